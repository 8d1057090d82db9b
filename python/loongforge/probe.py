# SPDX-License-Identifier: Apache-2.0
"""Does a replacement compute what a module computes? Both are run on a small random copy of the module, forward and backward.

A recogniser reads a module's structure and guesses what its forward does; here the guess is tried. The module itself is not
touched: no hook fires, no buffer or random state moves, and trained weights, which may hide a difference, play no part.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, suppress

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

HIDDEN = 8  # of an expert in the copy; 32 bytes, which fused products of torch ask for
TOLERANCE = 1e-4  # of the largest value, in f32; another routing is off by a tenth and more


class Unfit(Exception):
    """Why a module stays as it is: a sentence for the user."""


@contextmanager
def _aside():
    """Neither the caller's random numbers nor its autocast nor its grad mode have a part in this."""
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        with torch.inference_mode(False), torch.enable_grad():
            yield


def small_copy(module: nn.Module, shrunk: dict) -> nn.Module:
    """A copy on the CPU in f32 with random parameters of variance 1 / fan-in. shrunk: id of a parameter -> its shape in the copy.

    Raises Unfit where the module cannot be copied."""
    g = torch.Generator().manual_seed(20)
    memo = {}  # deepcopy takes a parameter's stand-in from here, wherever it is referred to
    for p in module.parameters():
        shape = shrunk.get(id(p), p.shape)
        value = torch.randn(tuple(shape), generator=g) * (shape[-1] if shape else 1) ** -0.5
        memo[id(p)] = nn.Parameter(value, p.requires_grad)
    hooks = [v for m in module.modules() for k, v in m.__dict__.items() if k[0] == "_" and "hooks" in k and isinstance(v, dict)]
    memo |= {id(v): type(v)() for v in hooks}  # they may lead anywhere
    try:
        twin = copy.deepcopy(module, memo)
        twin.to("cpu")
    except Exception as error:  # whatever a stranger's attributes raise
        raise Unfit(f"it cannot be copied to be tried out: {_short(error)}") from None
    for m in twin.modules():
        for name, b in m._buffers.items():
            m._buffers[name] = b.float() if b is not None and b.is_floating_point() else b
    return twin


def _short(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:120]}"


def _tensors(out) -> list:
    found = [out] if isinstance(out, torch.Tensor) else list(out) if isinstance(out, (tuple, list)) else None
    if not found or not all(isinstance(t, torch.Tensor) for t in found):
        raise Unfit(f"its forward returns {type(out).__name__}, expected a tensor or a tuple of tensors")
    return found


def run(module, call, inputs, training: bool) -> tuple[list, list]:
    """-> what it returns, and in training the gradients of inputs and parameters of a fixed function of that."""
    module.train(training)
    module.zero_grad(set_to_none=True)
    torch.manual_seed(21)
    leaves = [i.clone().requires_grad_(i.is_floating_point()) for i in inputs]
    out = _tensors(call(module, *[i * 1 for i in leaves]))  # not leaves: some forwards write into what they get
    if training:
        loss = sum((o * torch.arange(o.numel()).view(o.shape).sin()).sum() for o in out if o.requires_grad)
        if isinstance(loss, torch.Tensor):
            loss.backward()
    owners = [i for i in leaves if i.is_floating_point()] + [p for p in module.parameters() if p.requires_grad]
    grads = [torch.zeros_like(o) if o.grad is None else o.grad for o in owners] if training else []
    return [o.detach() for o in out], grads


class _Linears(TorchFunctionMode):
    """Notes the weight of each F.linear, and whether autocast was on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear and len(args) > 1:
            self.seen.append((args[1], torch.is_autocast_enabled("cpu")))
        return func(*args, **(kwargs or {}))


def _distance(stock: list, ours: list) -> float:
    """Largest difference of each pair against the largest value there, the worst of all pairs."""
    if [t.shape for t in stock] != [t.shape for t in ours]:
        return float("inf")
    worst = 0.0
    for a, b in zip(stock, ours):
        if a.numel():
            gap = (a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-2)
            worst = max(worst, float(gap) if gap == gap else float("inf"))
    return worst


class Trial:
    """One module's small copy against replacements of it.

    swap(copy, plan) turns a copy into the replacement that `plan` describes; call(copy, *inputs) runs it."""

    def __init__(self, twin: nn.Module, swap, call, inputs):
        self.twin, self.swap, self.call, self.inputs = twin, swap, call, inputs
        self.trouble = ""  # what a replacement raised, for the message
        self.stock = {training: self._stock(training) for training in (False, True)}

    def _stock(self, training):
        try:
            with _aside():
                return run(copy.deepcopy(self.twin), self.call, self.inputs, training)
        except Unfit:
            raise
        except Exception as error:
            raise Unfit(f"its forward does not run on a small copy of it: {_short(error)}") from None

    def use_of(self, child: str) -> tuple[bool, bool]:
        """Of a child that is an nn.Linear: is it called as a module, and is its weight used outside the caller's autocast?"""
        twin, called, watch = copy.deepcopy(self.twin).eval(), [], _Linears()
        layer = twin._modules[child]
        layer.register_forward_hook(lambda *_: called.append(True))
        with _aside(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16), watch, suppress(Exception):
            self.call(twin, *[i * 1 for i in self.inputs])  # it runs in f32; whether in bf16 is the user's affair
        autocast = [enabled for weight, enabled in watch.seen if weight is layer.weight]
        return bool(called), not any(autocast)

    def agrees(self, plan, training: bool) -> bool:
        """Same outputs, and in training the same gradients, from the same random numbers."""
        ours = copy.deepcopy(self.twin)
        self.swap(ours, plan)
        try:
            with _aside():
                out, grads = run(ours, self.call, self.inputs, training)
        except Exception as error:  # a wrong guess may lead to anything
            self.trouble = f" ({_short(error)})"
            return False
        stock_out, stock_grads = self.stock[training]
        return max(_distance(stock_out, out), _distance(stock_grads, grads)) <= TOLERANCE
