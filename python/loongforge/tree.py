# SPDX-License-Identifier: Apache-2.0
"""Is a model's module tree still as it was, and has it hooks? Asked at every step, so no name is built and nothing but identities
compared; names are looked for when something is wrong."""

from __future__ import annotations

from torch import nn

from .copies import StaysBehind

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs a hook of its own."""
    return any(getattr(module, kind) for kind in _HOOKS)


class HookWatch(StaysBehind):
    """True while one of these modules has a hook. Their dicts are found once, so that asking walks no tree."""

    def __init__(self, modules=()):
        self._hooks = [getattr(m, kind) for m in modules for kind in _HOOKS]

    def __bool__(self) -> bool:
        return any(self._hooks)


class TreeWatch:
    """A model's modules and parameters as they are now. blocks: the map's, with `param`, `weight` and `grad`."""

    def __init__(self, model: nn.Module, blocks):
        owners = {id(b.param): b.param for b in blocks}
        modules = [m for _, m in model.named_modules(remove_duplicate=False)]
        self._sizes = [(m._parameters, len(m._parameters), m._modules, len(m._modules)) for m in modules]
        self._members = [(m._modules, key, child) for m in modules for key, child in m._modules.items()]
        self._members += [(m._parameters, key, p) for m in modules for key, p in m._parameters.items() if id(p) in owners]
        self._places = [(b.param, b.weight.data_ptr(), b.grad is not None) for b in blocks]

    def is_undisturbed(self) -> bool:
        """Nothing was added, removed or exchanged, every parameter is in its place and as trainable as it was."""
        for parameters, n_parameters, children, n_children in self._sizes:
            if len(parameters) != n_parameters or len(children) != n_children:
                return False
        for holder, key, member in self._members:
            if holder.get(key) is not member:
                return False
        return all(p.data_ptr() == place and p.requires_grad == trained for p, place, trained in self._places)


def name_disturbance(model: nn.Module, blocks) -> None:
    """Raise with the name of the first parameter that is not as planned; none is where only modules came or went."""
    now = dict(model.named_parameters(remove_duplicate=False))
    known = {name for b in blocks for name in b.names}
    added = next((name for name in now if name not in known), None)
    if added is not None:
        raise RuntimeError(
            f"parameter {added} was added after planning and would never be trained; hint: call replan() on its map"
        )
    for b in blocks:
        for name in b.names:
            if now.get(name) is not b.param:
                raise RuntimeError(
                    f"parameter {name} was replaced (load_state_dict(assign=True), or an assignment); hint: load_state_dict "
                    "without assign, or accelerate the model again"
                )
        if b.param.data_ptr() != b.weight.data_ptr():
            raise RuntimeError(
                f"parameter {b.name} left the map (.to(), .half(), a wrapper such as FSDP, or .data =); expected it at "
                f"{b.weight.data_ptr():#x}, found {b.param.data_ptr():#x}; hint: choose device and dtype before accelerate"
            )
        if b.param.requires_grad != (b.grad is not None):
            state = "unfrozen" if b.param.requires_grad else "frozen"
            raise RuntimeError(f"parameter {b.name} was {state} after planning; hint: call replan() on its map")
