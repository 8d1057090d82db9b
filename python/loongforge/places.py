# SPDX-License-Identifier: Apache-2.0
"""Where a parameter belongs, read off the module tree: its layer, its expert, and whether it stays in f32."""

from __future__ import annotations

import re

from torch import nn

from . import blocks

TAIL = 2**31 - 1  # after the last layer
EMBED = -1  # before the first layer


def _layer_list(model: nn.Module, experts) -> str:
    """Path of the ModuleList that is the stack of layers: the one whose entries hold the most parameters, experts aside."""
    best, best_size = "", -1
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0 and name not in experts and "experts" not in name.split("."):
            size = sum(p.numel() for p in module.parameters())
            if size > best_size:
                best, best_size = name, size
    return best


def _expert_of(name: str, experts) -> int:
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and (".".join(parts[:i]) in experts or parts[i - 1 : i] == ["experts"]):
            return int(part)
    return -1


def locate(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Parameter name -> (layer, expert): layer EMBED before the stack of layers, TAIL behind it; expert -1 when dense, and for a
    parameter that holds all experts of its layer. An expert's gate and up stand side by side, in this order."""
    experts = blocks.expert_lists(model)
    stack = _layer_list(model, experts)
    inside = re.compile(rf"^{re.escape(stack)}\.(\d+)\.") if stack else None
    places, seen_stack = {}, False
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer = inside.match(name) if inside else None
        seen_stack |= layer is not None
        places[name] = (int(layer[1]) if layer else TAIL if seen_stack else EMBED, _expert_of(name, experts))
    return {name: places[name] for name in _gate_before_up(list(places), experts)}


def _gate_before_up(names: list, experts) -> list:
    """Names in their order, but the three weights of an expert as (gate, up, down): one product then makes gate and up."""
    at = {name: i for i, name in enumerate(names)}
    for path, (count, linears) in experts.items():
        for number in range(count if linears else 0):
            wanted = [f"{path}.{number}.{linear}.weight" for linear in linears]
            if all(name in at for name in wanted):
                for i, name in zip(sorted(at[name] for name in wanted), wanted):
                    names[i] = name
    return names


def is_kept_in_f32(name: str, param) -> bool:
    """Norms, biases and routers: small, and precision there is worth more than bytes. A router is a matrix in something called
    router, gate or …_gate outside the experts; a large one is the gate of a dense SwiGLU."""
    parts = name.split(".")
    gate = any(part.endswith("gate") for part in parts) and "experts" not in name and param.shape[0] <= 512
    return param.dim() < 2 or "router" in parts or gate
