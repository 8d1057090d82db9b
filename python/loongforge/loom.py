# SPDX-License-Identifier: Apache-2.0
"""ExpertLoom in PyTorch: routing, permutation and combination of a mixture of experts by the library's kernels.

`weave(model)` turns its mixtures of experts into woven ones, `unweave` back. Parameters, names and results stay; the order of
summation is fixed, so reruns give the same bits. A copy or a pickle of a woven model works as it is.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from . import _C
from .models.moe import MixtureOfExperts, Routed
from .streams import DTYPES, device_of, stream_of


def at(tensor: torch.Tensor) -> tuple:
    """Device and stream on which a kernel for this tensor runs: the first two arguments of each call."""
    return device_of(tensor), stream_of(tensor)


class Routing:
    """Where each token goes: the arrays of lf_routing, of n tokens, e experts, k choices."""

    def __init__(self, n: int, e: int, k: int, device, *, prob: bool = True, expert=None, weight=None):
        """prob: whether there is room for probabilities. expert (n, k) i32, weight (n, k) f32: instead of memory of its own."""
        i32 = dict(dtype=torch.int32, device=device)
        f32 = dict(dtype=torch.float32, device=device)
        self.n, self.e, self.k = n, e, k
        self.expert = torch.empty(n, k, **i32) if expert is None else expert
        self.weight = torch.empty(n, k, **f32) if weight is None else weight
        self.prob = torch.empty(n, e, **f32) if prob else None
        self.count, self.offset = torch.empty(e, **i32), torch.empty(e + 1, **i32)
        self.row, self.slot = torch.empty(n * k, **i32), torch.empty(n * k, **i32)
        arrays = (self.expert, self.weight, self.prob, self.count, self.offset, self.row, self.slot)
        self.addresses = tuple(t.data_ptr() if t is not None else 0 for t in arrays)

    @classmethod
    def of(cls, expert: torch.Tensor, weight: torch.Tensor, e: int) -> Routing:
        """Of choices that were made elsewhere. expert: (n, k), an id outside 0 to e - 1 goes nowhere; weight: (n, k) f32."""
        expert = expert.to(torch.int32).contiguous()
        r = cls(expert.shape[0], e, expert.shape[1], expert.device, prob=False, expert=expert, weight=weight.detach())
        _C.loom_sort(*at(expert), r.expert.data_ptr(), r.n, e, r.k, r.addresses)
        return r


_SCHEDULE = struct.Struct("=Iff")  # lf_route_schedule
SCHEDULE_BYTES = _SCHEDULE.size


def schedule_bytes(step: int, noise_scale: float, temperature: float) -> bytes:
    """An lf_route_schedule on the host."""
    return _SCHEDULE.pack(step & 0xFFFFFFFF, noise_scale, temperature)


@lru_cache(maxsize=16)
def route_schedule(step: int, noise_scale: float, temperature: float, device) -> torch.Tensor:
    """An lf_route_schedule on the device, shared by the layers of a step."""
    raw = bytearray(schedule_bytes(step, noise_scale, temperature))
    return torch.frombuffer(raw, dtype=torch.uint8).clone().to(device)


class Route(torch.autograd.Function):
    """logits: (n, e) f32; token: (n,) int64 -> gate weights (n, k) f32, probabilities without noise summed over valid tokens
    (e) f32; fills `routing`. Backward: softmax over the chosen, and over all for the sums."""

    @staticmethod
    def forward(ctx, logits, token, valid, seed, layer, schedule, routing):
        logits, r = logits.contiguous(), routing
        prob_sum = logits.new_empty(r.e)
        _C.loom_route(
            *at(logits),
            logits.data_ptr(),
            token.data_ptr(),
            valid.data_ptr() if valid is not None else 0,
            r.n,
            r.e,
            r.k,
            seed,
            layer,
            schedule.data_ptr(),
            r.addresses,
            prob_sum.data_ptr(),
        )
        ctx.routing, ctx.valid, ctx.schedule = r, valid, schedule
        return r.weight, prob_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, dweight, dprob_sum):
        r, dweight, dprob_sum = ctx.routing, dweight.contiguous(), dprob_sum.contiguous()
        dlogits = torch.empty(r.n, r.e, dtype=torch.float32, device=dweight.device)
        _C.loom_route_backward(
            *at(dweight),
            r.addresses,
            ctx.valid.data_ptr() if ctx.valid is not None else 0,
            dweight.data_ptr(),
            dprob_sum.data_ptr(),
            r.n,
            r.e,
            r.k,
            ctx.schedule.data_ptr(),
            dlogits.data_ptr(),
        )
        return dlogits, None, None, None, None, None, None


class Permute(torch.autograd.Function):
    """x: (n, d) -> rows sorted by expert (n k, d); rows of no expert are zero."""

    @staticmethod
    def forward(ctx, x, routing):
        x, r = x.contiguous(), routing
        rows = x.new_empty(r.n * r.k, x.shape[1])
        _C.loom_permute(*at(x), r.addresses, x.data_ptr(), r.n, r.e, r.k, x.shape[1], DTYPES[x.dtype], rows.data_ptr())
        ctx.routing = r
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, drows):
        r, drows = ctx.routing, drows.contiguous()
        dx = drows.new_empty(r.n, drows.shape[1])
        _C.loom_permute_backward(
            *at(drows),
            r.addresses,
            drows.data_ptr(),
            r.n,
            r.e,
            r.k,
            drows.shape[1],
            DTYPES[drows.dtype],
            0,
            0,
            dx.data_ptr(),
        )
        return dx, None


class Combine(torch.autograd.Function):
    """rows: (n k, d), weight: (n, k) f32 -> y (n, d): each token's rows, weighted, summed in f32 in order of choice."""

    @staticmethod
    def forward(ctx, rows, weight, routing):
        rows, r = rows.contiguous(), routing
        y = rows.new_empty(r.n, rows.shape[1])
        _C.loom_combine(*at(rows), r.addresses, rows.data_ptr(), r.n, r.e, r.k, rows.shape[1], DTYPES[rows.dtype], y.data_ptr())
        ctx.save_for_backward(rows)
        ctx.routing = r
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (rows,), r, dy = ctx.saved_tensors, ctx.routing, dy.contiguous()
        drows, dweight = torch.empty_like(rows), torch.empty(r.n, r.k, dtype=torch.float32, device=dy.device)
        _C.loom_combine_backward(
            *at(dy),
            r.addresses,
            rows.data_ptr(),
            dy.data_ptr(),
            r.n,
            r.e,
            r.k,
            rows.shape[1],
            DTYPES[rows.dtype],
            drows.data_ptr(),
            dweight.data_ptr(),
        )
        return drows, dweight, None


class WovenMixture(MixtureOfExperts):
    """A MixtureOfExperts whose routing and row movement are the library's. Same parameters, arguments and results."""

    def forward(self, x, token_index, valid, step, tau: float):
        """x: (b, t, d); token_index: (b t) int64; valid: (b t) bool or None -> (b, t, d), Routed"""
        c = self.config
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            clean = F.linear(x.float(), self.router.weight.float())
            scale = c.noise_scale(int(step)) if self.training else 0.0
            schedule = route_schedule(int(step), scale, float(tau), x.device)
            routing = Routing(x.shape[0], c.n_experts, c.experts_per_token, x.device)
            keep = valid.to(torch.uint8).contiguous() if valid is not None else None
            weight, prob_sum = Route.apply(clean, token_index.contiguous(), keep, c.seed, self.layer, schedule, routing)
        rows = self.run_experts(Permute.apply(x, routing), routing)
        return Combine.apply(rows, weight, routing).view(shape), Routed(routing.count.long(), prob_sum)

    def run_experts(self, rows, routing):
        """rows: (n k, d) sorted by expert -> (n k, d). Experts without rows run too: their gradient is then zero, not missing."""
        counts = routing.count.tolist()
        *parts, unrouted = rows.split([*counts, rows.shape[0] - sum(counts)])
        return torch.cat(
            [expert(part).to(rows.dtype) for expert, part in zip(self.experts, parts)] + [torch.zeros_like(unrouted)]
        )


def weave(model: nn.Module) -> int:
    """Turn every mixture of experts below `model` into a woven one, in place. -> how many there are"""
    stock = [m for m in model.modules() if type(m) is MixtureOfExperts]
    for module in stock:
        module.__class__ = WovenMixture
    return sum(isinstance(m, WovenMixture) for m in model.modules())


def unweave(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is WovenMixture:
            module.__class__ = MixtureOfExperts
