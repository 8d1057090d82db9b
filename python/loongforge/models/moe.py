# SPDX-License-Identifier: Apache-2.0
"""Mixture of unequal experts with a gumbel-softmax top-k router and a balance loss that is exact over ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .noise import gumbel_noise


class Permute(torch.autograd.Function):
    """Rows of x by token, laid out by expert; the gradient is a gather and a sum, never an atomic add."""

    @staticmethod
    def forward(ctx, x, order, inverse, k: int):
        # x: (n, d); order: (n * k) int64, slots sorted by expert; inverse: (n * k) int64, its inverse -> (n * k, d)
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Unpermute(torch.autograd.Function):
    """Rows laid out by expert, back to slot order (token-major). Pure permutation both ways."""

    @staticmethod
    def forward(ctx, y, order, inverse):
        # y: (n * k, d) -> (n * k, d)
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad[order], None, None


class Expert(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, d_model: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(d_model, hidden, bias=False)
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x):
        """x: (n, d) -> (n, d)"""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def expert_mixture(x, expert_ids, weights, experts):
    """x: (n, d); expert_ids: (n, k) int64; weights: (n, k) -> y: (n, d), counts: (n_experts) int64

    The id n_experts means "no expert". The reference: sort slots by expert (stable), run each expert that has
    tokens on its slice, bring the rows back, add the k of a token in a fixed order. An accelerated path replaces this
    function as a whole (`MixtureOfExperts.compute`).
    """
    n, k = expert_ids.shape
    slots = expert_ids.flatten()
    order = slots.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(n * k, device=x.device))
    counts = torch.bincount(slots, minlength=len(experts) + 1)
    rows = Permute.apply(x, order, inverse, k).split(counts.tolist())
    parts = [expert(part) for expert, part in zip(experts, rows) if part.shape[0]]
    parts.append(torch.zeros_like(rows[-1]))  # slots without an expert
    y = Unpermute.apply(torch.cat([p.to(x.dtype) for p in parts]), order, inverse).unflatten(0, (n, k))
    return (y * weights.to(x.dtype)[..., None]).sum(1), counts[:-1]


class Routed(NamedTuple):
    """What a layer's router reports; `prob_sum` carries gradient."""

    counts: torch.Tensor  # (n_experts) int64, slots given to each expert
    prob_sum: torch.Tensor  # (n_experts) float32, clean probabilities summed over real tokens


class MixtureOfExperts(nn.Module):
    """Router and experts of one layer. `compute` is the expert computation and may be replaced."""

    def __init__(self, config, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config.d_model, size) for size in config.expert_sizes)
        self.compute = expert_mixture

    def forward(self, x, token_index, valid, step, tau: float):
        """x: (b, t, d); token_index: (b * t) int64; valid: (b * t) bool or None -> (b, t, d), Routed"""
        c = self.config
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            clean = F.linear(x.float(), self.router.weight.float())
            logits = clean
            scale = c.noise_scale(int(step)) if self.training else 0.0
            if scale > 0:
                logits = clean + scale * gumbel_noise(c.seed, step, self.layer, token_index, c.n_experts)
            weights, ids = F.softmax(logits / tau, dim=-1).topk(c.experts_per_token, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
            probs = F.softmax(clean / tau, dim=-1)
            if valid is not None:
                ids = ids.masked_fill(~valid[:, None], c.n_experts)
                probs = probs * valid[:, None]
            prob_sum = probs.sum(0)
        y, counts = self.compute(x, ids, weights, self.experts)
        return y.view(shape), Routed(counts, prob_sum)


def expert_balancing_loss(counts, prob_sums, n_tokens, experts_per_token: int):
    """counts, prob_sums: (layers, n_experts) over all ranks; n_tokens: () over all ranks -> ()

    n_experts * sum_e(share of routed slots of e * mean probability of e), averaged over layers; 1 when even.
    Counts carry no gradient; probabilities do.
    """
    share = counts.to(prob_sums.dtype) / (experts_per_token * n_tokens)
    return counts.shape[-1] * (share * prob_sums / n_tokens).sum(-1).mean()
