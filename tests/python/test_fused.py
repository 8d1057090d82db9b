# SPDX-License-Identifier: Apache-2.0
"""Fused pieces of a step against autograd in double precision: results and every gradient, also for sizes that fit nothing."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from loongforge.fused import AddNorm, head_loss, linear_cross_entropy  # noqa: E402


def leaf(*shape, seed, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=g)).to(dtype).requires_grad_()


def assert_close(got, expected, tolerance):
    scale = expected.abs().max().clamp(min=1e-9)
    assert ((got.double() - expected) / scale).abs().max() < tolerance


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("n, d", [(1, 8), (7, 33), (65, 128)])
@pytest.mark.parametrize("summed", [True, False])
def test_add_norm(n, d, dtype, tolerance, summed):
    x, w = leaf(n, d, seed=1, dtype=dtype), leaf(d, seed=2)
    y = leaf(n, d, seed=3, dtype=dtype) if summed else None
    inputs = [t for t in (x, y, w) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    total = exact[0] + exact[1] if summed else exact[0] * 1
    normed = F.rms_norm(total, (d,), exact[-1], eps=1e-6)
    a, b = torch.randn(2, n, d, generator=torch.Generator().manual_seed(4)).to(dtype)
    got = AddNorm.apply(x, y, w, 1e-6)
    assert_close(got[0], total.detach(), tolerance)
    assert_close(got[1], normed.detach(), tolerance)
    grads = torch.autograd.grad([*got], inputs, [a, b])
    for mine, theirs in zip(grads, torch.autograd.grad([total, normed], exact, [a.double(), b.double()])):
        assert_close(mine, theirs, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("n, chunk", [(1, 4), (10, 4), (9, 64)])
def test_linear_cross_entropy(n, chunk, dtype, tolerance):
    h, w = leaf(n, 16, seed=1, dtype=dtype), leaf(50, 16, seed=2, dtype=dtype)
    target = torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(5))
    target[n // 2] = -100
    exact = [t.detach().double().requires_grad_() for t in (h, w)]
    expected = F.cross_entropy(F.linear(*exact), target, ignore_index=-100, reduction="sum")
    loss = linear_cross_entropy(h, w, target, chunk)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance, abs=1e-9)
    grads = torch.autograd.grad(0.25 * loss, [h, w])
    for mine, theirs in zip(grads, torch.autograd.grad(0.25 * expected, exact)):
        assert_close(mine, theirs, tolerance)
    with torch.no_grad():
        assert linear_cross_entropy(h, w, target, chunk).item() == pytest.approx(expected.item(), rel=tolerance, abs=1e-9)


def test_head_loss_is_the_models():
    from loongforge.models.gr00t_n16 import token_loss

    h, w = leaf(2, 7, 16, seed=1), leaf(50, 16, seed=2)
    labels = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(3))
    labels[0, 3] = -100
    a, b = head_loss(h, w, labels), token_loss(h, w, labels)
    assert a.item() == pytest.approx(b.item(), rel=1e-6)
    for mine, theirs in zip(torch.autograd.grad(a, [h, w]), torch.autograd.grad(b, [h, w])):
        assert_close(mine, theirs.double(), 1e-5)


def test_no_trained_target_gives_zero():
    h, w = leaf(3, 8, seed=1), leaf(5, 8, seed=2)
    loss = linear_cross_entropy(h, w, torch.full((3,), -100))
    assert loss.item() == 0
    assert all(not g.any() for g in torch.autograd.grad(loss, [h, w]))


@pytest.mark.parametrize("keep_h", [True, False])
def test_mixture_of_given_routing(keep_h):
    """Through the map: x, gate weights and every expert against autograd in double precision."""
    from torch import nn

    from loongforge import _C
    from loongforge.experts import ExpertSet
    from loongforge.fused import mixture
    from loongforge.loom import Routing, at
    from loongforge.mapping import ParameterMap

    torch.manual_seed(0)
    n, k, d, sizes = 37, 2, 64, (8, 24, 16, 40)
    shapes = lambda f: ((f, d), (f, d), (d, f))  # noqa: E731
    model = nn.ModuleList(nn.ParameterList(nn.Parameter(torch.randn(s) * 0.2) for s in shapes(f)) for f in sizes)
    exact = [[p.detach().double().requires_grad_() for p in row] for row in model]
    experts = ExpertSet(ParameterMap(model), [tuple(row) for row in model], keep_h=keep_h)
    chosen = torch.stack([torch.randperm(3)[:k] for _ in range(n)])  # the last expert gets no row
    x, gate = torch.randn(n, d, requires_grad=True), torch.rand(n, k, requires_grad=True)
    routing = Routing(n, len(sizes), k, x.device)
    routing.expert.copy_(chosen)
    routing.weight.copy_(gate.detach())
    _C.loom_sort(*at(x), routing.expert.data_ptr(), n, len(sizes), k, routing.addresses)
    dy = torch.randn(n, d)
    y = mixture(x, gate, routing, experts)
    y.backward(dy)
    x64, g64 = x.detach().double().requires_grad_(), gate.detach().double().requires_grad_()
    parts = torch.stack([F.linear(F.silu(F.linear(x64, g)) * F.linear(x64, u), w) for g, u, w in exact], 1)
    expected = (parts.gather(1, chosen[..., None].expand(n, k, d)) * g64[..., None]).sum(1)
    expected.backward(dy.double())
    assert_close(y.detach(), expected.detach(), 1e-5)
    assert_close(x.grad, x64.grad, 1e-5)
    assert_close(gate.grad, g64.grad, 1e-5)
    for row, row64 in zip(model, exact):
        for p, q in zip(row, row64):
            if q.grad.any():
                assert_close(p.grad, q.grad, 1e-5)
            else:
                assert not p.grad.any()


def test_targets_of_another_dtype_or_shape_are_refused():
    h, w = leaf(3, 8, seed=1), leaf(5, 8, seed=2)
    for target in (torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(TypeError, match="expected int64"):
            linear_cross_entropy(h, w, target)
