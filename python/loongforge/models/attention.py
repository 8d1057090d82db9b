# SPDX-License-Identifier: Apache-2.0
"""Attention over one packed projection (b, t, 3, h, d): exact causal, or dynamic sparse, where each query block attends to a
few key blocks chosen by content.

`select_blocks` decides and `sparse_attention` computes over a mask: the reference. On CUDA `blockwise_attention` takes the same
blocks and skips the others, forward and backward, by PyTorch's FlexAttention.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from . import attention_cudnn


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
    block = torch.arange(n, device=q.device)
    start = torch.arange(first, device=q.device).expand(n, first)
    near = block[:, None] - torch.arange(local, device=q.device)
    age = block[:, None] - start
    fixed = torch.cat((start.masked_fill(age < local, n), near.masked_fill(near < 0, n)), 1)  # n: no block
    fixed = fixed.expand(b, h, n, first + local)
    budget = min(top_k, max(n - local - first, 0))
    if budget > 0:
        whole = (n - 1) * block_size
        k_mean = k[:, :, :whole].unflatten(2, (n - 1, block_size)).mean(3, dtype=torch.float32)
        q_mean = q[:, :, 1 : whole + 1].unflatten(2, (n - 1, block_size)).mean(3, dtype=torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            score = q_mean @ k_mean.transpose(-1, -2)  # query blocks 1..n-1, key blocks 0..n-2
        candidate = (block[1:, None] - block[:-1] >= local) & (block[:-1] >= first)
        value, index = score.masked_fill(~candidate, float("-inf")).topk(budget, dim=-1, sorted=False)
        best = F.pad(index.masked_fill(value == float("-inf"), n), (0, 0, 1, 0), value=n)
        fixed = torch.cat((fixed, best), -1)
    chosen = fixed.sort(dim=-1).values[..., :n]
    return chosen.masked_fill(chosen == n, -1)


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
    """q, k, v: (b, h, t, d); blocks: of select_blocks -> (b, h, t, d). Exact over the chosen blocks. The reference: it
    computes every score, takes (b, h, t, t) of memory for the mask and saves nothing."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=block_mask(blocks, block_size, q.shape[2]))


def block_tables(blocks: torch.Tensor):
    """blocks: (b, h, n, w) of select_blocks, own block last -> four int32 tables of the blocks before the own one:

    keys of a query block: count (b, h, n), index (b, h, n, w); queries of a key block: count (b, h, n), index (b, h, n, n).
    Entries of index from count on mean nothing. Every such block is whole and needs no mask; the own block is the only
    one that does. Dense tensor operations only: nothing waits for the device.
    """
    b, h, n, w = blocks.shape
    own = torch.arange(n, device=blocks.device)
    earlier = (blocks >= 0) & (blocks != own[:, None])
    # from here (b, h, w, n), the query block last; an entry that is no earlier block becomes the own one
    key = torch.where(earlier, blocks, own[:, None]).transpose(-1, -2)
    edge = earlier.transpose(-1, -2)
    taken = torch.zeros(b, h, n, n, dtype=torch.int32, device=blocks.device).scatter(2, key, edge.to(torch.int32))
    place = taken.cumsum(-1, dtype=torch.int32)  # [key, query]: how many queries up to this one take the key
    # a key block has at most n - 1 later query blocks, so the last place of its row is free for what is no edge
    slot = torch.where(edge, key * n + place.gather(2, key) - 1, own * n + n - 1).flatten(-2)
    query = own.to(torch.int32).expand(b, h, w, n).flatten(-2)
    queries = torch.zeros(b, h, n * n, dtype=torch.int32, device=blocks.device).scatter(-1, slot, query)
    n_keys = earlier.sum(-1, dtype=torch.int32)
    return n_keys, blocks.clamp(min=0).to(torch.int32), place[..., -1].contiguous(), queries.view(b, h, n, n)


def _causal(_b, _h, query, key):
    return query >= key


def _flex_options(block_size: int, dtype: torch.dtype) -> dict:
    """Kernel tiles, within one block, and the true block size. The mask itself is declared with blocks of 128: the library
    asks its own Hopper tiles, which are 128 wide, to divide the declared size before it looks at the tiles given here."""
    tile = min(block_size, 32 if dtype == torch.float32 else 64)
    names = ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
    options = dict.fromkeys(names, tile)
    options.update(SPARSE_Q_BLOCK_SIZE=block_size, SPARSE_KV_BLOCK_SIZE=block_size)
    options.update(fwd_num_warps=4, fwd_num_stages=3, bwd_num_warps=4, bwd_num_stages=2)
    options.update(ROWS_GUARANTEED_SAFE=True)  # every query sees itself
    return options


@functools.cache
def _flex_core(block_size: int, dtype: torch.dtype):
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    options = _flex_options(block_size, dtype)

    def core(qkv, n_keys, keys, n_queries, queries):
        # qkv: (b, units, unit, 3, h, d). With the unit a constant the compiler knows that t is a multiple of 128 also where the
        # number of units varies, and the kernels need no bounds.
        qkv = qkv.flatten(1, 2)
        t = qkv.shape[1]
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        one = torch.ones_like(n_keys)
        own = torch.arange(keys.shape[2], dtype=torch.int32, device=qkv.device)[:, None]
        mask = BlockMask(
            seq_lengths=(t, t),
            kv_num_blocks=one,
            kv_indices=own.expand_as(keys).contiguous(),  # as wide as keys: PyTorch 2.11 uses one's strides for both
            full_kv_num_blocks=n_keys,
            full_kv_indices=keys,
            q_num_blocks=one,
            q_indices=own.expand_as(queries).contiguous(),
            full_q_num_blocks=n_queries,
            full_q_indices=queries,
            BLOCK_SIZE=(128, 128),
            mask_mod=_causal,
        )
        y = flex_attention(q, k, v, block_mask=mask, kernel_options=options)
        return y.transpose(1, 2).flatten(2)

    # A code object of its own: the compiler counts versions, and generalises numbers that change, by code object.
    core.__code__ = core.__code__.replace(co_name=f"blockwise_{block_size}_{str(dtype)[6:]}")
    return torch.compile(core, fullgraph=True)


def blockwise_attention(qkv, blocks, block_size: int):
    """qkv: (b, t, 3, h, d) contiguous, on CUDA; blocks: of select_blocks -> (b, t, h * d). As `sparse_attention`, but blocks
    that are not chosen are neither read nor computed. Compiled on first use and once more for lengths and batches that vary;
    nothing waits for the device, so a step that has run once can be captured in a CUDA graph. Reruns are bit-identical."""
    t = qkv.shape[1]
    unit = max(128, block_size)
    units = (t + unit - 1) // unit
    if units * unit != t:
        qkv = F.pad(qkv, (0, 0) * 3 + (0, units * unit - t))
        blocks = F.pad(blocks, (0, 0, 0, units * unit // block_size - blocks.shape[2]), value=-1)
    with torch.autocast(qkv.device.type, enabled=False):
        y = _flex_core(block_size, qkv.dtype)(qkv.unflatten(1, (units, unit)), *block_tables(blocks))
    return y[:, :t]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def why_masked(capability: tuple[int, int], head_dim: int, dtype: torch.dtype, block_size: int) -> str | None:
    """Why `blockwise_attention` cannot run on a CUDA device, or None where it can."""
    if not _has_triton():
        return "Triton is not installed"
    try:
        from torch.nn.attention.flex_attention import BlockMask
    except ImportError:
        return f"PyTorch {torch.__version__} has no FlexAttention, expected 2.6 or newer"
    if "seq_lengths" not in inspect.signature(BlockMask.__init__).parameters:
        return f"FlexAttention of PyTorch {torch.__version__} is too old, expected 2.6 or newer"
    if capability < (8, 0):
        return f"compute capability is {capability[0]}.{capability[1]}, expected 8.0 or newer"
    if block_size not in (16, 32, 64, 128):
        return f"block_size is {block_size}, expected 16, 32, 64 or 128"
    if head_dim not in (32, 64, 128):
        return f"head size is {head_dim}, expected 32, 64 or 128"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype is {dtype}, expected bfloat16, float16 or float32"
    return None


@functools.cache
def _warn_masked(reason: str) -> None:
    warnings.warn(
        f"sparse attention masks instead of skipping blocks, which saves no time: {reason}", RuntimeWarning, stacklevel=4
    )


def choose(qkv, block_size: int, top_k: int, local: int, first: int) -> torch.Tensor:
    """qkv: (b, t, 3, h, d) contiguous -> `select_blocks` of its q and k; on CUDA with Triton in three kernels."""
    n = (qkv.shape[1] + block_size - 1) // block_size
    budget = min(top_k, max(n - local - first, 0))
    if qkv.is_cuda and _has_triton():
        from . import attention_kernels as kernels

        if kernels.can_choose(n, budget, block_size):
            return kernels.choose_blocks(qkv, block_size, budget, local, first)
    q, k = (x.transpose(1, 2) for x in qkv[:, :, :2].unbind(2))
    return select_blocks(q, k, block_size, top_k, local, first)


def dynamic_sparse_attention(qkv, block_size: int, top_k: int, local: int, first: int):
    """qkv: (b, t, 3, h, d) contiguous -> (b, t, h * d). Skips blocks on CUDA; on other devices, and where CUDA lacks something
    (a warning names it once), the reference over a mask."""
    blocks = choose(qkv, block_size, top_k, local, first)
    if qkv.is_cuda:
        reason = why_masked(torch.cuda.get_device_capability(qkv.device), qkv.shape[-1], qkv.dtype, block_size)
        if reason is None:
            return blockwise_attention(qkv, blocks, block_size)
        _warn_masked(reason)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return sparse_attention(q, k, v, blocks, block_size).transpose(1, 2).flatten(2)


@functools.cache
def _dense_kernels(capability: tuple[int, int], deterministic: bool):
    """Context in which scaled_dot_product_attention takes the fastest exact kernel. On Hopper and later that is cuDNN, but its
    backward adds up dq in no fixed order, also under torch.use_deterministic_algorithms; flash then keeps one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if deterministic:
        order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    elif capability >= (9, 0):
        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    else:
        order = None
    if order is None or "set_priority" not in inspect.signature(sdpa_kernel).parameters:  # PyTorch before 2.7: its own choice
        return contextlib.nullcontext
    return functools.partial(sdpa_kernel, order, set_priority=True)


def dense_attention(qkv):
    """qkv: (b, t, 3, h, d) -> (b, t, h * d). Exact and causal. Of q, k, v as views along one dimension the gradient comes
    back in one copy; unpacking a permutation makes it several times that. With cuDNN's own front end there is no copy."""
    if qkv.is_cuda and qkv.is_contiguous():
        shape, deterministic = tuple(qkv.shape), torch.are_deterministic_algorithms_enabled()
        if attention_cudnn.serves(shape, qkv.dtype, qkv.device.index, deterministic):
            return attention_cudnn.PackedAttention.apply(qkv, deterministic)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    kernels = contextlib.nullcontext
    if qkv.is_cuda:
        kernels = _dense_kernels(torch.cuda.get_device_capability(qkv.device), torch.are_deterministic_algorithms_enabled())
    with kernels():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)


def rotate(x, base: float = 10000.0):
    """x: (b, t, ..., d) -> the same, rotated by position (d even)."""
    t, d = x.shape[1], x.shape[-1]
    freq = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * freq
    angle = angle.view(t, *(1,) * (x.dim() - 3), d // 2)
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
        qkv = self.qkv(x).view(b, t, 3, c.n_heads, d // c.n_heads)
        if c.position in ("rotary", "both"):
            qkv = torch.cat((rotate(qkv[:, :, :2]), qkv[:, :, 2:]), 2)
        if c.attention == "dense":
            y = dense_attention(qkv)
        else:
            y = dynamic_sparse_attention(qkv, c.block_size, c.top_k_blocks, c.local_blocks, c.first_blocks)
        return self.out(y)
