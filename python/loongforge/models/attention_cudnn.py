# SPDX-License-Identifier: Apache-2.0
"""Exact causal attention by cuDNN through its own front end (the optional package nvidia-cudnn-frontend): gradients of q, k and v
are written into one packed tensor, which PyTorch's operator cannot, and the deterministic backward is at hand."""

from __future__ import annotations

import functools
import threading

import torch

try:
    import cudnn
except Exception:  # not installed, or no libcudnn that it could load
    cudnn = None

_DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
_lock = threading.Lock()  # a handle has one stream at a time; backward runs on a thread of autograd's


@functools.cache
def _handle(device: int):
    with torch.cuda.device(device):
        return cudnn.create_handle()


def _views(packed):
    """packed: (b, t, 3, h, d) -> q, k, v (b, h, t, d)"""
    return [x.transpose(1, 2) for x in packed.unbind(2)]


class _Graph:
    """One cuDNN graph, built for shapes and strides; run with tensors of the same."""

    def __init__(self, device: int, dtype, make):
        kind = cudnn.data_type
        self.device = device
        self.graph = cudnn.pygraph(
            io_data_type=getattr(kind, _DTYPES[dtype]),
            intermediate_data_type=kind.FLOAT,
            compute_data_type=kind.FLOAT,
            handle=_handle(device),
        )
        self.tensors = make(self)
        g = self.graph
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        g.check_support()
        g.build_plans()
        self.workspace_bytes = max(g.get_workspace_size(), 1)

    def like(self, x, name: str):
        kind = getattr(cudnn.data_type, "FLOAT" if x.dtype == torch.float32 else _DTYPES[x.dtype])
        return self.graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind)

    def as_output(self, tensor, x):
        tensor.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
        if x.dtype == torch.float32:
            tensor.set_data_type(cudnn.data_type.FLOAT)
        return tensor

    def run(self, *values) -> None:
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=values[0].device)
        handle = _handle(self.device)
        with _lock:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(values[0].device).cuda_stream)
            self.graph.execute(dict(zip(self.tensors, values)), workspace, handle=handle)


def _buffers(shape, dtype, device):
    """-> qkv, output (b, h, t, d), logarithms of the sums (b, h, t, 1) of a (b, t, 3, h, d)"""
    b, t, _, h, d = shape
    out = torch.empty(b, t, h, d, dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=device), out, torch.empty(b, h, t, 1, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def _forward_graph(shape, dtype, device: int) -> _Graph:
    packed, out, sums = _buffers(shape, dtype, f"cuda:{device}")

    def make(g):
        q, k, v = (g.like(x, n) for x, n in zip(_views(packed), "qkv"))
        o, s = g.graph.sdpa(
            name="attention", q=q, k=k, v=v, is_inference=False, attn_scale=shape[-1] ** -0.5, use_causal_mask=True
        )
        return [q, k, v, g.as_output(o, out), g.as_output(s, sums)]

    return _Graph(device, dtype, make)


@functools.lru_cache(maxsize=64)
def _backward_graph(shape, dtype, device: int, deterministic: bool) -> _Graph:
    packed, out, sums = _buffers(shape, dtype, f"cuda:{device}")

    def make(g):
        q, k, v = (g.like(x, n) for x, n in zip(_views(packed), "qkv"))
        o, do, s = g.like(out, "o"), g.like(out, "do"), g.like(sums, "s")
        grads = g.graph.sdpa_backward(
            name="gradient",
            q=q,
            k=k,
            v=v,
            o=o,
            dO=do,
            stats=s,
            attn_scale=shape[-1] ** -0.5,
            use_causal_mask=True,
            use_deterministic_algorithm=deterministic,
        )
        return [q, k, v, o, do, s, *(g.as_output(x, like) for x, like in zip(grads, _views(packed)))]

    return _Graph(device, dtype, make)


@functools.lru_cache(maxsize=64)
def serves(shape, dtype, device: int, deterministic: bool) -> bool:
    """Whether cuDNN has kernels, forward and backward, for a packed (b, t, 3, h, d) of this shape."""
    if cudnn is None or dtype not in _DTYPES or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        _forward_graph(shape, dtype, device)
        _backward_graph(shape, dtype, device, deterministic)
    except Exception:  # cuDNN's answer to a shape it has no kernel for
        return False
    return True


class PackedAttention(torch.autograd.Function):
    """qkv: (b, t, 3, h, d), contiguous -> (b, t, h * d). `serves` says for which shapes."""

    @staticmethod
    def forward(ctx, qkv, deterministic: bool):
        key = (tuple(qkv.shape), qkv.dtype, qkv.device.index)
        packed = qkv.detach()
        _, out, sums = _buffers((*key[0][:2], 0, *key[0][3:]), qkv.dtype, qkv.device)
        _forward_graph(*key).run(*_views(packed), out, sums)
        ctx.save_for_backward(packed, out, sums)
        ctx.key, ctx.deterministic = key, deterministic
        return out.transpose(1, 2).flatten(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        packed, out, sums = ctx.saved_tensors
        b, t, _, h, d = packed.shape
        dout, grads = dy.contiguous().view(b, t, h, d).transpose(1, 2), torch.empty_like(packed)
        _backward_graph(*ctx.key, ctx.deterministic).run(*_views(packed), out, dout, sums, *_views(grads))
        return grads, None
