# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that choose the blocks of sparse attention: `select_blocks` in three launches. Imported where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _pool(qkv, q_mean, k_mean, stride_b, stride_t, m, h, d, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """qkv: (b, t, 3, h, d); q_mean, k_mean: (b, h, m, d) f32. One program: one block's rows of WIDE columns of (h, d)."""
    j = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < h * d
    row = j * BLOCK + tl.arange(0, BLOCK)
    at = qkv + b * stride_b + row[:, None].to(tl.int64) * stride_t + column[None, :]
    k = tl.load(at + h * d, mask=inside[None, :], other=0.0).to(tl.float32)
    q = tl.load(at + stride_t, mask=inside[None, :], other=0.0).to(tl.float32)  # ends at the next block's first query
    to = ((b * h + column // d) * m + j) * d + column % d
    tl.store(k_mean + to, tl.sum(k, 0) / BLOCK, mask=inside)
    tl.store(q_mean + to, tl.sum(q, 0) / BLOCK, mask=inside)


@triton.jit
def _choose(score, blocks, n_rows, n, width, top_k, local, first, N: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr):
    """score: (b, h, n - 1, n - 1) f32, query blocks from 1, key blocks from 0; blocks: (b, h, n, width) int64."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    i = r % n
    j = tl.arange(0, N)[None, :]
    candidate = (j >= first) & (i - j >= local)
    at = score + (r // n * (n - 1) + i - 1) * (n - 1) + j
    x = tl.load(at, mask=candidate & (r < n_rows), other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    keep = (j <= i) & ((i - j < local) | (j < first))
    for _ in range(top_k):
        best, where = tl.max(x, 1, return_indices=True)
        hit = (j == where[:, None]) & (best[:, None] > float("-inf"))
        keep = keep | hit
        x = tl.where(hit, float("-inf"), x)
    one = keep.to(tl.int32)
    count = tl.sum(one, 1)[:, None]
    row = blocks + r * width
    tl.store(row + tl.cumsum(one, 1) - 1, tl.zeros_like(one).to(tl.int64) + j, mask=keep & (r < n_rows))
    w = tl.arange(0, W)[None, :]
    none = (w >= count) & (w < width) & (r < n_rows)
    tl.store(row + w, tl.full((ROWS, W), -1, tl.int64), mask=none)


def can_choose(n: int, budget: int, block_size: int) -> bool:
    """Whether `choose_blocks` takes n blocks of block_size, budget > 0 of which are chosen by score."""
    return budget > 0 and 2 <= n <= 4096 and block_size <= 256 and block_size & (block_size - 1) == 0


@torch.no_grad()
def choose_blocks(qkv, block_size: int, budget: int, local: int, first: int) -> torch.Tensor:
    """qkv: (b, t, 3, h, d), (h, d) contiguous -> as `select_blocks` of its q and k; where `can_choose` says so."""
    b, t, _, h, d = qkv.shape
    n = (t + block_size - 1) // block_size
    width = min(first + local + budget, n)
    q_mean, k_mean = torch.empty(2, b, h, n - 1, d, device=qkv.device)
    blocks = torch.empty(b, h, n, width, dtype=torch.int64, device=qkv.device)
    wide = min(128, triton.next_power_of_2(h * d))
    grid = (n - 1, triton.cdiv(h * d, wide), b)
    _pool[grid](qkv, q_mean, k_mean, qkv.stride(0), qkv.stride(1), n - 1, h, d, BLOCK=block_size, WIDE=wide)
    with torch.autocast(qkv.device.type, enabled=False):
        score = q_mean @ k_mean.transpose(-1, -2)
    columns = triton.next_power_of_2(n)
    rows = max(1, 1024 // columns)
    grid = (triton.cdiv(b * h * n, rows),)
    _choose[grid](score, blocks, b * h * n, n, width, budget, local, first, N=columns, W=triton.next_power_of_2(width), ROWS=rows)
    return blocks
