# SPDX-License-Identifier: Apache-2.0
"""accelerate(model): parameters on the map, mixtures of experts through ExpertLoom. undo() restores the stock module."""

from __future__ import annotations

import warnings

from torch import nn

from . import adopt, blocks
from .loom import unweave, weave
from .mapping import ParameterMap, map_of
from .models.gr00t_n16 import Gr00tN16
from .woven import unweave_gr00t, weave_gr00t


def accelerate(
    model: nn.Module, *, optimizer=None, dtype=None, options: dict | None = None, pool_bytes: dict | None = None
) -> ParameterMap:
    """Put a model on a map and give its mixtures of experts our forward. -> the map

    Order: device and dtype, then ties and freezing, then accelerate, then an optimizer (`loongforge.AdamW(map)`), NexusSync and
    CheckpointVault. The model's names and shapes stay, its results too unless dtype asks for other weights (torch.bfloat16: f32
    masters, and state dicts in the original dtype). options: of section [map].

    optimizer: a torch.optim.AdamW over the model's parameters. `map.optimizer` is then a loongforge.AdamW with its groups, which
    both share (schedulers of the stock one go on working), its step counts and moments; the stock one refuses to step until undo
    gives them back. Another class is refused: leave it out, and step it beside the map.

    Mixtures of experts are found by their structure: Gr00tN16's, hand-written ones of SwiGLU experts and a linear router, those
    of Hugging Face transformers. `map.woven` says which were taken, and which were left and why; one warning names the latter.
    """
    held = map_of(model)
    if held is not None and (dtype or options or pool_bytes):
        raise RuntimeError("the model is on a map already, so options come too late; hint: undo(model) first")
    known = (held.optimizer, held.adopted and held.adopted.stock) if held is not None else ()
    adopts = optimizer is not None and not any(optimizer is one for one in known)
    if adopts:
        adopt.check(optimizer, model, held)
    report = blocks.weave(model)
    try:
        held = held or ParameterMap(model, options, dtype=dtype, pool_bytes=pool_bytes)
    except Exception:
        blocks.unweave(model)
        raise
    if type(model) is Gr00tN16 and held.torch_device.type == "cuda":
        try:
            weave_gr00t(model, held)
        except NotImplementedError as why:
            warnings.warn(f"layers run unfused, with a look at the token counts in each: {why}", RuntimeWarning, stacklevel=2)
    if held.torch_device.type == "cuda" and (reasons := blocks.plan_products(model, held)):
        warnings.warn(f"experts run one by one, with a look at the token counts in each layer: {reasons[0]}", stacklevel=2)
    weave(model)
    held.woven = report
    if adopts:
        held.adopted = adopt.Adopted(optimizer, held)
    if held.woven.left:
        warnings.warn(
            "mixtures of experts that accelerate left as they are:\n  " + "\n  ".join(held.woven._replace(taken=[]).lines()),
            stacklevel=2,
        )
    return held


def undo(model: nn.Module) -> None:
    """Take a model off its map: parameters own their memory, forwards and state dicts are stock again. An optimizer that
    accelerate took over has its state back. Refused, with nothing changed, while a NexusSync reduces its gradients."""
    held = map_of(model)
    if held is not None and held.sync is not None:
        raise RuntimeError("a NexusSync reduces the model's gradients and would stop; hint: sync.close() first")
    if held is not None:
        held.require_whole("undo")
    unweave_gr00t(model)
    unweave(model)
    blocks.unweave(model)
    if held is not None:
        held.release()
        if held.adopted is not None:
            held.adopted.give_back()
