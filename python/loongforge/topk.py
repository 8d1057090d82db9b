# SPDX-License-Identifier: Apache-2.0
"""Top-k with error feedback over ranks, for one tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from . import _C, peers
from .streams import DTYPES, device_of, stream_of

_FOLD, _SELECT, _PACK, _SCATTER = range(4)
_residuals = WeakTensorKeyDictionary()
_turns: dict = {}


def topk_allreduce(grad: torch.Tensor, k_ratio: float = 0.15, group=None, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over ranks of the share of entries that one rank in turn finds largest, with error feedback. -> dense sum

    grad: any shape, float32 or bfloat16, left as it is. residual: float32 of grad's shape, updated in place: what was not sent is
    added to the next call's gradient, so nothing is lost (sent + residual is grad + old residual, rounded once). Left out, it is
    kept for this tensor object; pass it when `grad` is a new tensor each step. All ranks call in the same order.
    Exactly round(k_ratio n) entries, at least one; of equal ones those in front; NaN and infinities first.
    Cyclic local top-k: Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression", NeurIPS 2020.
    """
    if not 0 < k_ratio <= 1:
        raise ValueError(f"k_ratio is {k_ratio}, expected above 0 and at most 1")
    if grad.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"grad is {grad.dtype}, expected torch.float32 or torch.bfloat16")
    if residual is None:
        residual = _residuals.get(grad)
    if residual is None:
        residual = _residuals[grad] = torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)
    if not residual.is_contiguous() or residual.shape != grad.shape or residual.dtype != torch.float32:
        raise ValueError("residual is not contiguous, not of grad's shape or not float32")
    n = grad.numel()
    if n == 0:
        return grad.clone()
    flat = grad.detach().reshape(-1).contiguous()
    k = min(max(1, round(k_ratio * n)), n)
    out, values = torch.empty_like(flat), flat.new_empty(k)
    mask = torch.empty((n + 63) // 64, dtype=torch.int64, device=grad.device)
    scratch = torch.empty(_C.topk_scratch_bytes(n), dtype=torch.uint8, device=grad.device)
    addresses = tuple(t.data_ptr() for t in (flat, out, residual, mask, values, scratch))

    def run(part: int) -> None:
        _C.topk(device_of(grad), part, addresses, (n, k, DTYPES[grad.dtype]), stream_of(grad))

    world = peers.torch_world_of(group, "topk_allreduce")
    turn = _turns[group] = (_turns.get(group, -1) + 1) % world
    run(_FOLD)
    if world == 1 or dist.get_rank(group) == turn:
        run(_SELECT)
    if world > 1:
        dist.broadcast(mask, dist.get_global_rank(group, turn) if group else turn, group=group)
    run(_PACK)
    if world > 1:
        dist.all_reduce(values, group=group)
    run(_SCATTER)
    return out.view(grad.shape)
