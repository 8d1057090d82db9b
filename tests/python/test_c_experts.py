# SPDX-License-Identifier: Apache-2.0
"""The extension's calls of the experts' products: numbers against autograd, wrong arguments."""

import gc

import pytest
import torch

from loongforge import _C

F32, BF16 = 1, 2
HIDDEN, COUNT, D, SPARE = [24, 8, 40, 16], [5, 0, 13, 1], 32, 3


@pytest.fixture(scope="module")
def cpu():
    return _C.device_open("cpu")


class Layer:
    """Random weights and rows, and everything that the two calls write."""

    def __init__(self, dtype, grad_dtype):
        torch.manual_seed(5)
        rows, most = sum(COUNT) + SPARE, max(HIDDEN)
        self.max_rows, self.dtype, self.grad_dtype = rows, dtype, grad_dtype
        self.w_gu = [torch.randn(2 * f, D).mul(0.3).to(dtype) for f in HIDDEN]
        self.w_down = [torch.randn(D, f).mul(0.3).to(dtype) for f in HIDDEN]
        self.dw_gu = [torch.full_like(w, torch.nan, dtype=grad_dtype) for w in self.w_gu]
        self.dw_down = [torch.full_like(w, torch.nan, dtype=grad_dtype) for w in self.w_down]
        self.xs, self.dys = torch.randn(rows, D).to(dtype), torch.randn(rows, D).to(dtype)
        self.ys, self.dxs = torch.full_like(self.xs, torch.nan), torch.full_like(self.xs, torch.nan)
        self.gu, self.dgu = (torch.full((rows * 2 * most,), torch.nan, dtype=dtype) for _ in range(2))
        self.h, self.dh = (torch.full((rows * most,), torch.nan, dtype=dtype) for _ in range(2))
        self.offset = torch.tensor([0, *COUNT]).cumsum(0).int()

    def open(self, device, gradients=True):
        at = lambda tensors: [t.data_ptr() for t in tensors]  # noqa: E731
        dtypes = {torch.float32: F32, torch.bfloat16: BF16}
        grads = (at(self.dw_gu), at(self.dw_down)) if gradients else (None, None)
        return _C.loom_experts_open(
            device, D, self.max_rows, dtypes[self.dtype], dtypes[self.grad_dtype], HIDDEN, at(self.w_gu), at(self.w_down), *grads
        )

    def run(self, experts, accumulate, keep=True):
        p = lambda t: t.data_ptr()  # noqa: E731
        _C.loom_experts_forward(experts, 0, p(self.offset), p(self.xs), p(self.gu), p(self.h), p(self.ys))
        h, written = p(self.h) if keep else 0, (p(self.dgu), p(self.dh), p(self.dxs))
        _C.loom_experts_backward(experts, 0, p(self.offset), p(self.xs), p(self.gu), h, p(self.dys), *written, accumulate)

    def reference(self):
        """ys, dxs, [dw_gu], [dw_down] of the routed rows by autograd in float64."""
        rows = sum(COUNT)
        xs = self.xs[:rows].double().requires_grad_()
        w_gu = [w.double().requires_grad_() for w in self.w_gu]
        w_down = [w.double().requires_grad_() for w in self.w_down]
        out = []
        for x, gu, down in zip(xs.split(COUNT), w_gu, w_down):
            gate, up = (x @ gu.T).chunk(2, -1)
            out.append((torch.nn.functional.silu(gate) * up) @ down.T)
        ys = torch.cat(out)
        ys.backward(self.dys[:rows].double())
        return ys.detach(), xs.grad, [w.grad for w in w_gu], [w.grad for w in w_down]


@pytest.mark.parametrize("dtype, grad_dtype, near", [(torch.float32, torch.float32, 1e-5), (torch.bfloat16, torch.float32, 2e-2)])
def test_experts_match_autograd(cpu, dtype, grad_dtype, near):
    layer = Layer(dtype, grad_dtype)
    experts = layer.open(cpu)
    layer.run(experts, 0)
    ys, dxs, dw_gu, dw_down = layer.reference()
    rows = sum(COUNT)

    def close(a, b):
        return (a.double() - b).abs().max() <= near * b.abs().max().clamp(min=1e-3)

    assert close(layer.ys[:rows], ys) and close(layer.dxs[:rows], dxs)
    assert layer.ys[rows:].isnan().all() and layer.dxs[rows:].isnan().all()
    for got, want in zip(layer.dw_gu + layer.dw_down, dw_gu + dw_down):
        assert close(got, want)
    once = [g.clone() for g in layer.dw_gu + layer.dw_down]
    layer.run(experts, 1)
    for got, first in zip(layer.dw_gu + layer.dw_down, once):
        assert torch.equal(got, 2 * first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_h_made_again_gives_the_bits_of_h_kept(cpu, dtype):
    layers = [Layer(dtype, torch.float32) for _ in range(2)]
    for layer, keep in zip(layers, (True, False)):
        layer.run(layer.open(cpu), 0, keep)
    kept, again = layers
    used = sum(f * n for f, n in zip(HIDDEN, COUNT))
    for name in ("dgu", "dxs", "h"):
        assert torch.equal(getattr(kept, name).nan_to_num(7), getattr(again, name).nan_to_num(7))
    for a, b in zip(kept.dw_gu + kept.dw_down, again.dw_gu + again.dw_down):
        assert torch.equal(a, b)
    assert torch.equal(again.dh[:used], again.h[:used]) and not torch.equal(kept.dh[:used], kept.h[:used])


def test_experts_without_gradients(cpu):
    layer = Layer(torch.float32, torch.float32)
    experts = layer.open(cpu, gradients=False)
    layer.run(experts, 0)
    assert (layer.dxs[: sum(COUNT)] - layer.reference()[1]).abs().max() < 1e-4
    assert all(g.isnan().all() for g in layer.dw_gu + layer.dw_down)


def test_a_plan_keeps_its_device(cpu):
    layer = Layer(torch.float32, torch.float32)
    experts = layer.open(_C.device_open("cpu"))
    gc.collect()
    layer.run(experts, 0)
    experts.close()
    with pytest.raises(ValueError, match="closed"):
        layer.run(experts, 0)


def test_wrong_arguments_are_named(cpu):
    with pytest.raises(TypeError, match="takes 10 arguments, got 1"):
        _C.loom_experts_open(cpu)
    with pytest.raises(TypeError, match="lf_device"):
        _C.loom_experts_open(3, 8, 4, F32, F32, [8], [16], [16], None, None)
    with pytest.raises(TypeError, match="hidden is 8, expected a list"):
        _C.loom_experts_open(cpu, 8, 4, F32, F32, 8, [16], [16], None, None)
    with pytest.raises(TypeError, match="w_down is None"):
        _C.loom_experts_open(cpu, 8, 4, F32, F32, [8], [16], None, None, None)
    with pytest.raises(ValueError, match="w_down has 2 entries, expected 1"):
        _C.loom_experts_open(cpu, 8, 4, F32, F32, [8], [16], [16, 16], None, None)
    with pytest.raises(OverflowError, match=r"hidden\[0\] is 4294967296"):
        _C.loom_experts_open(cpu, 8, 4, F32, F32, [2**32], [16], [16], None, None)
    with pytest.raises(OverflowError):
        _C.loom_experts_open(cpu, 8, 4, F32, F32, [8], [-16], [16], None, None)
    with pytest.raises(_C.Error, match="d is 0 features"):
        _C.loom_experts_open(cpu, 0, 4, F32, F32, [8], [16], [16], None, None)
    with pytest.raises(_C.Error, match="dw_gu is given and dw_down NULL"):
        _C.loom_experts_open(cpu, 8, 4, F32, F32, [8], [16], [16], [16], None)
    layer = Layer(torch.float32, torch.float32)
    experts = layer.open(cpu)
    with pytest.raises(TypeError, match="takes 7 arguments, got 3"):
        _C.loom_experts_forward(experts, 0, 0)
    with pytest.raises(TypeError, match="takes 11 arguments, got 2"):
        _C.loom_experts_backward(experts, 0)
    with pytest.raises(TypeError, match="lf_experts"):
        _C.loom_experts_forward(cpu, 0, 0, 0, 0, 0, 0)
    with pytest.raises(_C.Error, match="xs is NULL"):
        _C.loom_experts_forward(experts, 0, layer.offset.data_ptr(), 0, 16, 16, 16)
    with pytest.raises(TypeError):
        _C.loom_experts_forward(experts, 0, layer.offset.data_ptr(), "xs", 16, 16, 16)
    with pytest.raises(_C.Error, match="accumulate is 2"):
        _C.loom_experts_backward(experts, 0, layer.offset.data_ptr(), 16, 16, 0, 16, 16, 16, 16, 2)
    with pytest.raises(_C.Error, match="h and dh are the same"):
        _C.loom_experts_backward(experts, 0, layer.offset.data_ptr(), 16, 16, 16, 16, 16, 16, 16, 0)
