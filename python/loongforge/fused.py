# SPDX-License-Identifier: Apache-2.0
"""Fused pieces of a step as autograd functions over the library's kernels. Shapes: n tokens, d features, e experts, k choices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from . import _C
from .loom import Routing, at
from .streams import DTYPES

_workspaces: dict = {}


def _workspace(size: int, tensor: torch.Tensor) -> int:
    """Address of scratch that work of this stream alone uses, one call after another."""
    stream = at(tensor)[1]
    held = _workspaces.setdefault((tensor.device, stream), [])
    if not held or held[-1].numel() < size:  # a smaller one stays: a captured graph may write there
        held.append(torch.empty(max(size, 16 << 20), dtype=torch.uint8, device=tensor.device))
    return held[-1].data_ptr()


def norm_backward(total, weight, rstd, dtotal, dnormed):
    """total, dtotal (may be None), dnormed: (n, d) -> dx (n, d), dweight (d) f32"""
    dnormed = dnormed.contiguous()
    dx, dweight = torch.empty_like(total), torch.empty_like(weight)
    _C.loom_add_norm_backward(
        *at(total),
        total.data_ptr(),
        weight.data_ptr(),
        rstd.data_ptr(),
        dtotal.data_ptr() if dtotal is not None else 0,
        dnormed.data_ptr(),
        *total.shape,
        DTYPES[total.dtype],
        dx.data_ptr(),
        dweight.data_ptr(),
        False,
        _workspace(_C.loom_add_norm_workspace(*total.shape), total),
    )
    return dx, dweight


class AddNorm(torch.autograd.Function):
    """x, y: (n, d), y may be None; weight: (d) f32 -> x + y, RMSNorm(x + y) * weight, both (n, d)"""

    @staticmethod
    def forward(ctx, x, y, weight, eps):
        x, y = x.contiguous(), y.contiguous() if y is not None else None
        total = torch.empty_like(x) if y is not None else x
        normed, rstd = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        _C.loom_add_norm(
            *at(x),
            x.data_ptr(),
            y.data_ptr() if y is not None else 0,
            weight.data_ptr(),
            eps,
            *x.shape,
            DTYPES[x.dtype],
            total.data_ptr() if y is not None else 0,
            normed.data_ptr(),
            rstd.data_ptr(),
        )
        ctx.save_for_backward(total, weight, rstd)
        ctx.summed = y is not None
        return total.view_as(total), normed

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal, dnormed):
        total, weight, rstd = ctx.saved_tensors
        dx, dweight = norm_backward(total, weight, rstd, dtotal.contiguous(), dnormed)
        return dx, dx if ctx.summed else None, dweight, None


class MixtureAddNorm(torch.autograd.Function):
    """A layer's mixture of experts, its residual and the norm behind it, with no product in between kept twice.

    x: (n, d) residual; h: (n, d) normed input; router: (e, d) f32; weight: (d) f32 of the norm that follows; call: a MixtureCall
    -> x + mixture(h), its RMSNorm, counts (e) i32, prob_sum (e) f32 (clean probabilities over valid tokens)
    """

    @staticmethod
    def forward(ctx, x, h, router, weight, anchor, call):
        x, h = x.contiguous(), h.contiguous()
        c, experts = call, call.experts
        n, d = h.shape
        routing = Routing(n, router.shape[0], c.k, h.device)
        logits = torch.empty(n, routing.e, dtype=torch.float32, device=h.device)
        prob_sum = torch.empty(routing.e, dtype=torch.float32, device=h.device)
        _C.loom_router(*at(h), h.data_ptr(), router.data_ptr(), n, routing.e, d, DTYPES[h.dtype], logits.data_ptr())
        _C.loom_route(
            *at(h),
            logits.data_ptr(),
            c.token.data_ptr() if c.token is not None else 0,
            c.valid.data_ptr() if c.valid is not None else 0,
            n,
            routing.e,
            routing.k,
            c.seed,
            c.layer,
            c.schedule.data_ptr(),
            routing.addresses,
            prob_sum.data_ptr(),
        )
        xs = h.new_empty(n * routing.k, d)
        _C.loom_permute(*at(h), routing.addresses, h.data_ptr(), n, routing.e, routing.k, d, DTYPES[h.dtype], xs.data_ptr())
        gu, hidden, ys = experts.forward(routing.offset, xs)
        total, normed = torch.empty_like(x), torch.empty_like(x)
        rstd = torch.empty(n, dtype=torch.float32, device=h.device)
        _C.loom_combine_add_norm(
            *at(h),
            routing.addresses,
            ys.data_ptr(),
            n,
            routing.e,
            routing.k,
            d,
            DTYPES[h.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            c.eps,
            total.data_ptr(),
            normed.data_ptr(),
            rstd.data_ptr(),
        )
        ctx.save_for_backward(h, router, weight, xs, gu, hidden, ys, total, rstd)
        ctx.routing, ctx.call = routing, call
        ctx.mark_non_differentiable(routing.count)
        return total, normed, routing.count, prob_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal, dnormed, _, dprob_sum):
        h, router, weight, xs, gu, hidden, ys, total, rstd = ctx.saved_tensors
        r, c = ctx.routing, ctx.call
        n, d = h.shape
        shape = (n, r.e, r.k, d, DTYPES[h.dtype])
        dx, dweight = norm_backward(total, weight, rstd, dtotal.contiguous(), dnormed)
        dys, dgate = torch.empty_like(ys), torch.empty(n, r.k, dtype=torch.float32, device=h.device)
        _C.loom_combine_backward(*at(h), r.addresses, ys.data_ptr(), dx.data_ptr(), *shape, dys.data_ptr(), dgate.data_ptr())
        dlogits = torch.empty(n, r.e, dtype=torch.float32, device=h.device)
        dprob_sum = dprob_sum.contiguous() if dprob_sum is not None else None
        _C.loom_route_backward(
            *at(h),
            r.addresses,
            c.valid.data_ptr() if c.valid is not None else 0,
            dgate.data_ptr(),
            dprob_sum.data_ptr() if dprob_sum is not None else 0,
            n,
            r.e,
            r.k,
            c.schedule.data_ptr(),
            dlogits.data_ptr(),
        )
        dxs = c.experts.backward(c.begun, r.offset, xs, gu, hidden, dys)
        drouter = torch.empty_like(router)
        _C.loom_router_backward(
            *at(h),
            dlogits.data_ptr(),
            h.data_ptr(),
            n,
            r.e,
            d,
            DTYPES[h.dtype],
            drouter.data_ptr(),
            False,
            _workspace(_C.loom_router_workspace(n, r.e, d), h),
        )
        dh = torch.empty_like(h)
        _C.loom_permute_backward(
            *at(h), r.addresses, dxs.data_ptr(), *shape, dlogits.data_ptr(), router.data_ptr(), dh.data_ptr()
        )
        return dx, dh, drouter, dweight, None, None


class Mixture(torch.autograd.Function):
    """x: (n, d); weight: (n, k) f32, the tensor that `routing` has; routing: filled, of the same tokens; experts: an ExpertSet,
    begun: its begin's -> y (n, d), the weighted sum of each token's experts. anchor: () that requires a gradient, so that
    backward runs for the experts alone too."""

    @staticmethod
    def forward(ctx, x, weight, anchor, routing, experts, begun):
        x, r = x.contiguous(), routing
        shape = (r.n, r.e, r.k, x.shape[1], DTYPES[x.dtype])
        xs, y = x.new_empty(r.n * r.k, x.shape[1]), torch.empty_like(x)
        _C.loom_permute(*at(x), r.addresses, x.data_ptr(), *shape, xs.data_ptr())
        gu, hidden, ys = experts.forward(r.offset, xs)
        _C.loom_combine(*at(x), r.addresses, ys.data_ptr(), *shape, y.data_ptr())
        ctx.save_for_backward(xs, gu, hidden, ys)
        ctx.routing, ctx.experts, ctx.begun, ctx.shape = r, experts, begun, shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        xs, gu, hidden, ys = ctx.saved_tensors
        r, dy = ctx.routing, dy.contiguous()
        dys, dweight = torch.empty_like(ys), torch.empty_like(r.weight)
        _C.loom_combine_backward(
            *at(dy), r.addresses, ys.data_ptr(), dy.data_ptr(), *ctx.shape, dys.data_ptr(), dweight.data_ptr()
        )
        dxs, dx = ctx.experts.backward(ctx.begun, r.offset, xs, gu, hidden, dys), torch.empty_like(dy)
        _C.loom_permute_backward(*at(dy), r.addresses, dxs.data_ptr(), *ctx.shape, 0, 0, dx.data_ptr())
        return dx, dweight, None, None, None, None


def mixture(x, weight, routing, experts) -> torch.Tensor:
    """Mixture with an anchor of its own."""
    anchor = torch.zeros((), device=x.device, requires_grad=experts.trained)
    return Mixture.apply(x, weight, anchor, routing, experts, experts.begin())


class LinearCrossEntropy(torch.autograd.Function):
    """hidden: (n, d); weight: (v, d); target: (n) i64, negative ignored -> (), the sum over tokens of -log softmax(hidden W^T).

    The logits exist a chunk of tokens at a time; both gradients are made while they do, with no product computed twice (as
    Liger's chunked kernel: Hsu et al., "Liger Kernel", 2024), and scaled when backward brings its factor.
    """

    @staticmethod
    def forward(ctx, hidden, weight, target, chunk, trained):
        hidden, target = hidden.contiguous(), target.contiguous()
        (n, d), v = hidden.shape, weight.shape[0]
        wants = trained and any(ctx.needs_input_grad[:2])
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        row_loss = torch.empty(chunk, dtype=torch.float32, device=hidden.device)
        room = hidden.new_empty(min(chunk, max(n, 1)), v)
        dhidden = torch.empty_like(hidden) if wants else None
        dweight = torch.zeros(v, d, dtype=torch.float32, device=hidden.device) if wants else None
        for first in range(0, n, chunk):
            part, goal = hidden[first : first + chunk], target[first : first + chunk]
            logits = room[: part.shape[0]]
            torch.mm(part, weight.t(), out=logits)
            _C.loom_cross_entropy(
                *at(hidden),
                logits.data_ptr(),
                goal.data_ptr(),
                part.shape[0],
                v,
                v,
                DTYPES[logits.dtype],
                row_loss.data_ptr(),
                loss.data_ptr(),
                True,
                wants,
            )
            if wants:
                torch.mm(logits, weight, out=dhidden[first : first + chunk])
                _add_product(dweight, logits.t(), part)
        if wants:
            ctx.save_for_backward(dhidden, dweight)
            ctx.dtype = weight.dtype
        return loss.float()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dhidden, total = ctx.saved_tensors
        dloss = dloss.float()
        return _scaled(dhidden, dloss, dhidden.dtype), _scaled(total, dloss, ctx.dtype), None, None, None


def _scaled(x, scale, dtype) -> torch.Tensor:
    """x * scale in f32, rounded once to dtype. scale: () f32 on x's device"""
    y = torch.empty_like(x, dtype=dtype)
    _C.loom_add(*at(x), y.data_ptr(), DTYPES[dtype], x.data_ptr(), DTYPES[x.dtype], x.numel(), scale.data_ptr(), False)
    return y


_WIDE_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")


def _add_product(total, a, b) -> None:
    """total (f32) += a b, the product not rounded to bf16 on the way where PyTorch can (2.8)."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif _WIDE_PRODUCTS and a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)


def linear_cross_entropy(hidden, weight, target, chunk: int = 8192) -> torch.Tensor:
    """hidden: (…, d); weight: (v, d); target: (…) i64 -> (), summed over targets that are not negative"""
    if target.dtype != torch.int64 or target.shape != hidden.shape[:-1]:
        raise TypeError(
            f"targets are {target.dtype} {tuple(target.shape)}, expected int64 {tuple(hidden.shape[:-1])} with ids below "
            f"{weight.shape[0]}; a larger one makes the loss nan"
        )
    hidden = hidden.reshape(-1, hidden.shape[-1])
    return LinearCrossEntropy.apply(hidden, weight, target.reshape(-1), chunk, torch.is_grad_enabled())


def head_loss(hidden, weight, labels) -> torch.Tensor:
    """hidden: (b, t, d); labels: (b, t), negative untrained -> (), the sum over next tokens. The last position predicts none."""
    target = F.pad(labels[:, 1:], (0, 1), value=-100)
    return linear_cross_entropy(hidden, weight, target)
