# SPDX-License-Identifier: Apache-2.0
"""ExpertLoom in PyTorch: routing, permutation and combination of a mixture of experts by the library's kernels.

`weave(model)` turns its mixtures of experts into woven ones, `unweave` back. Parameters, names and results stay; the order of
summation is fixed, so reruns give the same bits. A copy or a pickle of a woven model works as it is.
"""

from __future__ import annotations

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

    def __init__(self, n: int, e: int, k: int, device):
        i32 = dict(dtype=torch.int32, device=device)
        f32 = dict(dtype=torch.float32, device=device)
        self.n, self.e, self.k = n, e, k
        self.expert, self.weight = torch.empty(n, k, **i32), torch.empty(n, k, **f32)
        self.prob = torch.empty(n, e, **f32)
        self.count, self.offset = torch.empty(e, **i32), torch.empty(e + 1, **i32)
        self.row, self.slot = torch.empty(n * k, **i32), torch.empty(n * k, **i32)
        arrays = (self.expert, self.weight, self.prob, self.count, self.offset, self.row, self.slot)
        self.addresses = tuple(t.data_ptr() for t in arrays)


class Route(torch.autograd.Function):
    """logits: (n, e) f32 -> gate weights (n, k) f32; fills `routing`. Backward: softmax over the chosen, through all logits."""

    @staticmethod
    def forward(ctx, logits, noise, valid, temperature, routing):
        logits = logits.contiguous()
        _C.loom_route(
            *at(logits),
            logits.data_ptr(),
            noise.data_ptr() if noise is not None else 0,
            valid.data_ptr() if valid is not None else 0,
            routing.n,
            routing.e,
            routing.k,
            temperature,
            routing.addresses,
        )
        ctx.routing, ctx.temperature = routing, temperature
        return routing.weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dweight):
        r, dweight = ctx.routing, dweight.contiguous()
        dlogits = torch.empty(r.n, r.e, dtype=torch.float32, device=dweight.device)
        _C.loom_route_backward(*at(dweight), r.addresses, dweight.data_ptr(), r.n, r.e, r.k, ctx.temperature, dlogits.data_ptr())
        return dlogits, None, None, None, None


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


def gumbel_noise(seed: int, step: int, layer: int, token_index: torch.Tensor, n_experts: int) -> torch.Tensor:
    """token_index: (n,) int64 -> (n, n_experts) f32; the numbers of models.noise.gumbel_noise."""
    token_index = token_index.contiguous()
    noise = torch.empty(token_index.numel(), n_experts, dtype=torch.float32, device=token_index.device)
    _C.loom_gumbel(
        *at(token_index),
        token_index.data_ptr(),
        token_index.numel(),
        n_experts,
        seed,
        int(step),
        layer,
        noise.data_ptr(),
    )
    return noise


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
            noise = gumbel_noise(c.seed, step, self.layer, token_index, c.n_experts).mul_(scale) if scale > 0 else None
            routing = Routing(x.shape[0], c.n_experts, c.experts_per_token, x.device)
            keep = valid.to(torch.uint8).contiguous() if valid is not None else None
            weight = Route.apply(clean, noise, keep, float(tau), routing)
            prob = F.softmax(clean / tau, dim=-1)
            prob_sum = (prob * valid[:, None] if valid is not None else prob).sum(0)
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
