# SPDX-License-Identifier: Apache-2.0
"""Where a module keeps the weights of its experts, and whether ExpertLoom's kernels can stand in for them."""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import torch
from torch import nn

from .probe import HIDDEN, Unfit

MAX_EXPERTS, MAX_CHOICES = 256, 8  # LF_MAX_EXPERTS, LF_MAX_TOP_K
LINEARS = (("gate_proj", "up_proj", "down_proj"), ("gate", "up", "down"), ("w1", "w3", "w2"), ("g", "u", "d"))
FUSED = ("gate_up_proj", "down_proj")  # (e, 2 f, d), gate's rows over up's; (e, d, f)


class Experts(NamedTuple):
    """Weights of the experts of one layer: rows of (gate, up, down) of shapes (f, d), (f, d), (d, f), or all of them fused as
    (gate_up, down) of shapes (e, 2 f, d), (e, d, f)."""

    rows: list | None
    fused: tuple | None

    @property
    def count(self) -> int:
        return self.fused[0].shape[0] if self.fused else len(self.rows)

    @property
    def width(self) -> int:
        """d"""
        return self.fused[0].shape[2] if self.fused else self.rows[0][0].shape[1]

    def parameters(self) -> list:
        return list(self.fused) if self.fused else [w for row in self.rows for w in row]

    def shrunk(self) -> dict:
        """Shapes in a small copy: other hidden sizes, unequal where each expert has its own."""
        if self.fused:
            e, _, d = self.fused[0].shape
            return {id(self.fused[0]): (e, 2 * HIDDEN, d), id(self.fused[1]): (e, d, HIDDEN)}
        shapes = {}
        for i, (gate, up, down) in enumerate(self.rows):
            f = HIDDEN * (1 + i % 3)
            shapes |= {id(gate): (f, self.width), id(up): (f, self.width), id(down): (self.width, f)}
        return shapes


def _linears(expert: nn.Module) -> dict:
    """Shapes of an expert's three nn.Linear without biases, by name; {} when it has anything else with weights."""
    own = {name: m for name, m in expert.named_children() if next(m.parameters(), None) is not None}
    if len(own) != 3 or expert._parameters or any(type(m) is not nn.Linear or m.bias is not None for m in own.values()):
        return {}
    return {name: tuple(m.weight.shape) for name, m in own.items()}


def linear_names(experts) -> list[tuple[str, str, str]]:
    """Ways to name the (gate, up, down) of SwiGLU experts that agree with their shapes, likeliest first; [] for other experts."""
    shapes = [_linears(m) for m in experts]
    if not shapes or not shapes[0] or any(set(s) != set(shapes[0]) for s in shapes):
        return []
    known = [n for n in LINEARS if set(n) == set(shapes[0])]
    fits = lambda s, gate, up, down: s[gate] == s[up] and s[down] == s[gate][::-1]  # noqa: E731
    return [n for n in known or permutations(shapes[0]) if all(fits(s, *n) for s in shapes)]


def is_expert_list(module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 1 and bool(linear_names(module))


def read(holder: nn.Module, linears: tuple | None) -> Experts:
    """Of a ModuleList whose entries have linears of these names, or of a module with fused weights."""
    if linears is None:
        return Experts(None, tuple(holder._parameters[n] for n in FUSED))
    return Experts([tuple(m._modules[n]._parameters["weight"] for n in linears) for m in holder], None)


def examine(holder: nn.Module, k: int | None) -> list:
    """Ways to read a holder of experts: linears for `_read`. Raises Unfit when the kernels cannot stand in for what is there."""
    ways = _examine_list(holder) if isinstance(holder, nn.ModuleList) else _examine_fused(holder)
    experts = read(holder, ways[0])
    if experts.count > MAX_EXPERTS:
        raise Unfit(f"it has {experts.count} experts, the kernels take up to {MAX_EXPERTS}")
    if k is not None and k > MAX_CHOICES:
        raise Unfit(f"it makes {k} choices a token, the kernels take up to {MAX_CHOICES}")
    dtypes = {w.dtype for w in experts.parameters()}
    if not dtypes <= {torch.float32, torch.bfloat16}:
        raise Unfit(f"its weights are {', '.join(sorted(map(str, dtypes)))}, expected float32 or bfloat16")
    return ways


def _examine_list(holder: nn.ModuleList) -> list:
    ways = linear_names(holder)
    if not ways:
        kinds = ", ".join(sorted({type(m).__name__ for m in holder})) or "none"
        raise Unfit(f"its experts ({kinds}) are not three nn.Linear without biases each")
    if len({row[0].shape[1] for row in read(holder, ways[0]).rows}) > 1:
        raise Unfit("its experts have inputs of different widths")
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__ for part in holder.modules()):
        raise Unfit("an expert has hooks of its own, which would not run")
    return ways


def _examine_fused(holder: nn.Module) -> list:
    own = {n: p for n, p in holder._parameters.items() if p is not None}
    if set(own) != set(FUSED):
        raise Unfit(f"its weights are {', '.join(own)}; expected {' and '.join(FUSED)} alone")
    gate_up, down = (tuple(own[n].shape) for n in FUSED)
    if len(gate_up) != 3 or len(down) != 3 or down != (gate_up[0], gate_up[2], gate_up[1] // 2) or gate_up[1] % 2:
        raise Unfit(f"its weights are {gate_up} and {down}, expected (e, 2 f, d) and (e, d, f)")
    return [None]
