# SPDX-License-Identifier: Apache-2.0
"""The extension's calls of norms and the loss: numbers against torch's autograd."""

import math

import pytest
import torch
import torch.nn.functional as F

from loongforge import _C

F32, BF16 = 1, 2


@pytest.fixture(scope="module")
def cpu():
    return _C.device_open("cpu")


def nans(*shape):
    return torch.full(shape, math.nan)


def test_norm_of_a_sum_matches_autograd(cpu):
    """Two norms in a row, the second on the sum that the first left, as a layer has them."""
    torch.manual_seed(3)
    n, d, eps = 37, 48, 1e-6
    x, y, ds, dn = (torch.randn(n, d) for _ in range(4))
    weight = torch.rand(d) + 0.5
    ours = [t.clone() for t in (x, y, weight)]
    for t in (x, y, weight):
        t.requires_grad_()
    s = x + y
    normed = F.rms_norm(s, (d,), weight, eps)
    torch.autograd.backward([s, normed], [ds, dn])

    s_out, normed_out, rstd = nans(n, d), nans(n, d), nans(n)
    a = [t.data_ptr() for t in ours]
    _C.loom_add_norm(cpu, 0, *a, eps, n, d, F32, s_out.data_ptr(), normed_out.data_ptr(), rstd.data_ptr())
    torch.testing.assert_close(s_out, s.detach())
    torch.testing.assert_close(normed_out, normed.detach())
    dx, dweight = nans(n, d), torch.ones(d)
    workspace = torch.empty(_C.loom_add_norm_workspace(n, d), dtype=torch.uint8)
    out = (n, d, F32, dx.data_ptr(), dweight.data_ptr(), 1, workspace.data_ptr())
    _C.loom_add_norm_backward(cpu, 0, s_out.data_ptr(), a[2], rstd.data_ptr(), ds.data_ptr(), dn.data_ptr(), *out)
    torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(dx, y.grad)
    torch.testing.assert_close(dweight - 1, weight.grad, rtol=1e-5, atol=1e-5)


def test_combine_and_norm_is_combine_then_norm(cpu):
    torch.manual_seed(4)
    n, e, k, d = 29, 5, 2, 16
    i32 = dict(dtype=torch.int32)
    arrays = [torch.empty(n, k, **i32), torch.empty(n, k), torch.empty(n, e), torch.empty(e, **i32), torch.empty(e + 1, **i32)]
    arrays += [torch.empty(n * k, **i32), torch.empty(n * k, **i32)]
    routing = tuple(t.data_ptr() for t in arrays)
    logits, ys, x, weight = torch.randn(n, e), torch.randn(n * k, d), torch.randn(n, d), torch.rand(d)
    _C.loom_route(cpu, 0, logits.data_ptr(), 0, 0, n, e, k, 0, 0, 0, routing, 0)
    y, s, normed, rstd, s2, normed2, rstd2 = nans(n, d), nans(n, d), nans(n, d), nans(n), nans(n, d), nans(n, d), nans(n)
    _C.loom_combine(cpu, 0, routing, ys.data_ptr(), n, e, k, d, F32, y.data_ptr())
    w, out = weight.data_ptr(), (s.data_ptr(), normed.data_ptr(), rstd.data_ptr())
    _C.loom_add_norm(cpu, 0, x.data_ptr(), y.data_ptr(), w, 1e-6, n, d, F32, *out)
    out = (s2.data_ptr(), normed2.data_ptr(), rstd2.data_ptr())
    _C.loom_combine_add_norm(cpu, 0, routing, ys.data_ptr(), n, e, k, d, F32, x.data_ptr(), w, 1e-6, *out)
    assert torch.equal(s, s2) and torch.equal(normed, normed2) and torch.equal(rstd, rstd2)  # in f32 nothing is rounded between


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_matches_autograd(cpu, dtype):
    torch.manual_seed(5)
    n, v, ld = 61, 501, 512
    padded = torch.randn(n, ld).mul(3).to(dtype)
    target = torch.randint(0, v, (n,))
    target[::7] = -100
    logits = padded[:, :v].float().requires_grad_()
    loss = F.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
    loss.backward()

    row_loss, total = nans(n), torch.full((1,), 2.0, dtype=torch.float64)
    code = F32 if dtype == torch.float32 else BF16
    shape = (padded.data_ptr(), target.data_ptr(), n, v, ld, code)
    _C.loom_cross_entropy(cpu, 0, *shape, row_loss.data_ptr(), total.data_ptr(), 1, 0)
    assert total.item() - 2 == pytest.approx(loss.item(), rel=1e-6)
    before = padded.clone()
    _C.loom_cross_entropy(cpu, 0, *shape, row_loss.data_ptr(), total.data_ptr(), 0, 1)
    assert total.item() == pytest.approx(loss.item(), rel=1e-6)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(padded[:, :v].float(), logits.grad, rtol=rounding, atol=1e-7)
    assert torch.equal(padded[:, v:], before[:, v:])


def test_bad_arguments_are_errors(cpu):
    x = torch.zeros(8)
    with pytest.raises(TypeError, match="12 arguments"):
        _C.loom_add_norm(cpu, 0)
    with pytest.raises(_C.Error, match="ld is 3"):
        _C.loom_cross_entropy(cpu, 0, x.data_ptr(), x.data_ptr(), 1, 4, 3, F32, x.data_ptr(), x.data_ptr(), 0, 0)
