# SPDX-License-Identifier: Apache-2.0
"""What LoongForge is measured against: n16 with dense attention as users of PyTorch write it.

stock: a loop over experts, bf16 autocast over f32 weights, torch.optim.AdamW. strong: experts padded to the largest, one grouped
product (torch._grouped_mm, PyTorch 2.9 on Hopper), fused AdamW, torch.compile.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class StockExpert(nn.Module):
    def __init__(self, d, ff):
        super().__init__()
        self.g, self.u, self.d = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x):
        return self.d(F.silu(self.g(x)) * self.u(x))


def drawn_noise(logits):
    return -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))


def _choose(moe, x, noise):
    """x: (n, d); noise: (n, e) or None: drawn while training -> the top two's weights and ids (n, 2)"""
    logits = moe.router(x).float()
    if noise is None and moe.training:
        noise = drawn_noise(logits)
    if noise is not None:
        logits = logits + noise
    w, i = F.softmax(logits, -1).topk(2, -1)
    return w / w.sum(-1, keepdim=True), i


class StockMoE(nn.Module):
    """The loop over experts. noise: (n, e) from outside, or None: drawn while training."""

    def __init__(self, c):
        super().__init__()
        self.experts = nn.ModuleList(StockExpert(c.d_model, f) for f in c.expert_sizes)
        self.router = nn.Linear(c.d_model, c.n_experts, bias=False)

    def forward(self, x, noise=None):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        w, i = _choose(self, x, noise)
        w = w.to(x.dtype)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            r, c = (i == e).nonzero(as_tuple=True)
            y = y.index_add(0, r, expert(x[r]).to(y.dtype) * w[r, c, None])
        return y.view(shape)


class SortedMoE(StockMoE):
    """The same with one sort and one look at the counts a layer."""

    def forward(self, x, noise=None):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        w, i = _choose(self, x, noise)
        slots = i.flatten()
        order = slots.argsort(stable=True)
        counts = torch.bincount(slots, minlength=len(self.experts)).tolist()
        parts = x[order // 2].split(counts)
        ys = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        y = torch.zeros_like(x).index_add(0, order // 2, (ys * w.flatten()[order, None]).to(x.dtype))
        return y.view(shape)


class GroupedMoE(nn.Module):
    """All experts padded to the largest, three grouped products, nothing read on the host."""

    def __init__(self, c):
        super().__init__()
        d, f, self.e = c.d_model, max(c.expert_sizes), c.n_experts
        self.gate, self.up = (nn.Parameter(torch.randn(self.e, d, f) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(self.e, f, d) * 0.02)
        self.router = nn.Linear(d, self.e, bias=False)

    def forward(self, x, noise=None):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        w, i = _choose(self, x, noise)
        slots = i.flatten()
        order = slots.argsort(stable=True)
        counts = torch.zeros(self.e, device=x.device, dtype=torch.int64).scatter_add_(0, slots, torch.ones_like(slots))
        ends, bf16 = counts.cumsum(0).to(torch.int32), torch.bfloat16
        xs = x.to(bf16)[order // 2]
        h = F.silu(torch._grouped_mm(xs, self.gate.to(bf16), offs=ends)) * torch._grouped_mm(xs, self.up.to(bf16), offs=ends)
        ys = torch._grouped_mm(h, self.down.to(bf16), offs=ends) * w.flatten()[order, None].to(bf16)
        return torch.zeros_like(x, dtype=bf16).index_add(0, order // 2, ys).view(shape)


class StockBlock(nn.Module):
    def __init__(self, c, moe):
        super().__init__()
        self.n1, self.n2, self.h = nn.RMSNorm(c.d_model), nn.RMSNorm(c.d_model), c.n_heads
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model, bias=False), nn.Linear(c.d_model, c.d_model, bias=False)
        self.moe = moe(c)

    def forward(self, x, noise=None):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.moe(self.n2(x), noise)


class StockModel(nn.Module):
    """config: a Gr00tN16Config; what of it concerns positions, sparsity and balance is not here."""

    def __init__(self, config, moe=StockMoE):
        super().__init__()
        c = config
        self.e, self.patch = nn.Embedding(c.vocab_size, c.d_model), nn.Conv2d(3, c.d_model, c.patch_size, c.patch_size)
        self.b, self.n = nn.ModuleList(StockBlock(c, moe) for _ in range(c.n_layers)), nn.RMSNorm(c.d_model)

    def forward(self, img, ids, noise=None):
        """noise: a (n, e) a layer, or None: drawn"""
        x = torch.cat([self.patch(img).flatten(2).transpose(1, 2), self.e(ids)], 1)
        for layer, block in enumerate(self.b):
            x = block(x, None if noise is None else noise[layer])
        x = self.n(x)[:, -ids.shape[1] :]
        return F.cross_entropy(F.linear(x[:, :-1], self.e.weight).float().flatten(0, 1), ids[:, 1:].flatten())


_NAMES = (
    ("embed.", "e."),
    ("layers.", "b."),
    ("attention_norm.", "n1."),
    ("moe_norm.", "n2."),
    ("attention.qkv.", "qkv."),
    ("attention.out.", "o."),
    (".gate.", ".g."),
    (".up.", ".u."),
    (".down.", ".d."),
    ("norm.", "n."),
)


def stock_name(name: str) -> str:
    """A parameter's name in Gr00tN16 -> its name in StockModel"""
    for ours, stock in _NAMES:
        name = name.replace(ours, stock)
    return name


def stock_of(model, moe=StockMoE) -> StockModel:
    """The stock model with the weights of a Gr00tN16, on the same device."""
    stock = StockModel(model.config, moe).to(next(model.parameters()).device)
    stock.load_state_dict({stock_name(k): v.float() for k, v in model.state_dict().items()})
    return stock
