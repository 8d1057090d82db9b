# SPDX-License-Identifier: Apache-2.0
"""Dynamic sparse attention: each query block attends to a few key blocks chosen by content.

`select_blocks` decides, `attend` computes. The reference computes over a mask; a block-skipping kernel takes the same
index tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


@torch.no_grad()
def select_blocks(q, k, block_size: int, top_k: int, local: int, first: int) -> torch.Tensor:
    """q, k: (b, h, t, d) -> (b, h, n_blocks, first + local + top_k) int64 key blocks, ascending, padded with -1.

    A query block i keeps the first blocks, the `local` blocks ending at itself, and the top_k best of the remaining
    earlier blocks, scored by mean-pooled keys . mean-pooled queries, per head. The choice holds for every query of the
    block, so it must not depend on any query after the block's first: the pooled window is the block_size queries that
    END at the block's first query. Pooled key blocks all lie before the query block, hence are complete. So the
    selection is causal, and a sequence that ends inside a block needs no special case.
    """
    b, h, t, d = q.shape
    n = (t + block_size - 1) // block_size
    device = q.device
    block = torch.arange(n, device=device)
    age = block[:, None] - block[None, :]  # query block - key block
    fixed = (age >= 0) & ((age < local) | (block[None, :] < first))
    keep = fixed.expand(b, h, n, n)
    candidates = (age >= 0) & ~fixed
    budget = min(top_k, max(n - local - first, 0))
    if budget > 0:
        whole = (n - 1) * block_size
        k_mean = k[:, :, :whole].float().unflatten(2, (n - 1, block_size)).mean(3)
        q_mean = q[:, :, 1 : whole + 1].float().unflatten(2, (n - 1, block_size)).mean(3)
        score = q_mean @ k_mean.transpose(-1, -2)  # query blocks 1..n-1, key blocks 0..n-2
        score = F.pad(score, (0, 1, 1, 0)).masked_fill(~candidates, float("-inf"))
        value, index = score.topk(budget, dim=-1)
        keep = keep.scatter(-1, index, (value > float("-inf")) | keep.gather(-1, index))
    width = min(first + local + budget, n)
    ascending = torch.where(keep, block, n).sort(dim=-1).values[..., :width]
    return ascending.masked_fill(ascending == n, -1)


def block_mask(blocks: torch.Tensor, block_size: int, t: int) -> torch.Tensor:
    """blocks: (b, h, n, w) of select_blocks -> (b, h, t, t) bool, True where a query may see a key."""
    b, h, n, _ = blocks.shape
    keep = torch.zeros(b, h, n, n + 1, dtype=torch.bool, device=blocks.device)
    keep = keep.scatter(-1, blocks.masked_fill(blocks < 0, n), True)[..., :n]
    keep = keep[:, :, :, None, :, None].expand(b, h, n, block_size, n, block_size)
    causal = torch.ones(n * block_size, n * block_size, dtype=torch.bool, device=blocks.device).tril()
    causal = causal.view(n, block_size, n, block_size)
    return (keep & causal).reshape(b, h, n * block_size, n * block_size)[:, :, :t, :t]


def sparse_attention(q, k, v, blocks, block_size: int):
    """q, k, v: (b, h, t, d); blocks: of select_blocks -> (b, h, t, d). Exact over the chosen blocks."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=block_mask(blocks, block_size, q.shape[2]))


def rotate(x, base: float = 10000.0):
    """x: (b, h, t, d) -> the same, rotated by position (d even)."""
    t, d = x.shape[-2:]
    freq = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention, dense or dynamic sparse. Projections are bias-free; q, k, v come from one matrix."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x):
        """x: (b, t, d) -> (b, t, d)"""
        c = self.config
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, c.n_heads, d // c.n_heads).permute(2, 0, 3, 1, 4)
        if c.position in ("rotary", "both"):
            q, k = rotate(q), rotate(k)
        if c.attention == "dense":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            blocks = select_blocks(q, k, c.block_size, c.top_k_blocks, c.local_blocks, c.first_blocks)
            y = sparse_attention(q, k, v, blocks, c.block_size)
        return self.out(y.transpose(1, 2).reshape(b, t, d))
