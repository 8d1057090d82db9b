# SPDX-License-Identifier: Apache-2.0
"""Sparse attention by blocks: the choice, the index tables, the GPU path against the masked reference; dense attention."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from loongforge.models import attention as module  # noqa: E402
from loongforge.models.attention import (  # noqa: E402
    Attention,
    block_mask,
    block_tables,
    blockwise_attention,
    dense_attention,
    dynamic_sparse_attention,
    select_blocks,
    sparse_attention,
    why_masked,
)
from loongforge.models.config import preset  # noqa: E402

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BUDGETS = [(2, 2, 1), (0, 1, 0), (8, 1, 3), (3, 5, 9), (100, 2, 1)]  # top_k, local, first
SHAPES = [(1, 4), (4, 4), (5, 4), (21, 4), (64, 4), (130, 8)]  # t, block


def heads(qkv):
    return [x.transpose(1, 2) for x in qkv.unbind(2)]


def packed(b, t, h, d, dtype=torch.float32, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, t, 3, h, d, generator=g).to(device, dtype)


def masked(qkv, blocks, block):
    """The reference over a packed projection."""
    return sparse_attention(*heads(qkv), blocks, block).transpose(1, 2).flatten(2)


def some_blocks(t, block, budget, seed=0):
    q, k, _ = heads(packed(2, t, 3, 8, seed=seed))
    return select_blocks(q, k, block, *budget)


# ---- the choice and its tables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("t, block", SHAPES)
def test_lists_and_mask_say_the_same(t, block, budget):
    blocks = some_blocks(t, block, budget)
    n = (t + block - 1) // block
    top_k, local, first = budget
    assert blocks.shape == (2, 3, n, min(first + local + min(top_k, max(n - local - first, 0)), n))
    mask = block_mask(blocks, block, t)
    query = torch.arange(t)
    assert not (mask & (query > query[:, None])).any(), "a query sees a later key"
    for row in range(t):
        own = row // block
        for seen, chosen in zip(mask[:, :, row].flatten(0, 1), blocks[:, :, own].flatten(0, 1).tolist()):
            kept = [j for j in chosen if j >= 0]
            assert kept == sorted(set(kept)) and kept[-1] == own and chosen[len(kept) :] == [-1] * (len(chosen) - len(kept))
            assert set(range(max(own - local + 1, 0), own + 1)) | set(range(min(first, own + 1))) <= set(kept)
            assert seen.nonzero().flatten().tolist() == [key for key in range(row + 1) if key // block in kept]


def test_choice_ignores_what_comes_later():
    qkv = packed(1, 40, 2, 8)
    q, k, _ = heads(qkv)
    before = select_blocks(q, k, 4, 2, 1, 1)
    for cut in (16, 17, 20, 23, 39):  # a block's first query belongs to its window: later ones do not
        changed = qkv.clone()
        changed[:, cut:] = packed(1, 40 - cut, 2, 8, seed=cut)
        q, k, _ = heads(changed)
        fixed = (cut - 1) // 4 + 1
        assert torch.equal(select_blocks(q, k, 4, 2, 1, 1)[:, :, :fixed], before[:, :, :fixed])
    q, k, _ = heads(packed(1, 40, 2, 8, seed=9))
    assert not torch.equal(select_blocks(q, k, 4, 2, 1, 1), before), "the choice ignores its input"


def test_choice_keeps_its_precision_under_autocast():
    q, k, _ = heads(packed(2, 256, 4, 16))
    plain = select_blocks(q, k, 4, 4, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(select_blocks(q, k, 4, 4, 1, 1), plain)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("t, block", SHAPES)
def test_tables_are_the_lists_and_their_transpose(t, block, budget):
    blocks = some_blocks(t, block, budget)
    n = blocks.shape[2]
    tables = block_tables(blocks)
    assert all(x.dtype == torch.int32 for x in tables)
    n_keys, keys, n_queries, queries = tables
    assert keys.min() >= 0 and queries.min() >= 0, "a kernel reads the first entry also where the count is 0"
    for x in range(2):
        for y in range(3):
            pairs = [(i, j) for i, row in enumerate(blocks[x, y].tolist()) for j in row if 0 <= j < i]
            for i in range(n):
                assert keys[x, y, i, : n_keys[x, y, i]].tolist() == [j for q, j in pairs if q == i]
                assert queries[x, y, i, : n_queries[x, y, i]].tolist() == [q for q, j in pairs if j == i]


def test_tables_agree_with_the_library():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    blocks = some_blocks(96, 4, (3, 2, 1))
    n_keys, keys, n_queries, queries = block_tables(blocks)
    n = blocks.shape[2]
    wide = torch.nn.functional.pad(keys, (0, n - keys.shape[3]))
    own = torch.arange(n, dtype=torch.int32)[:, None].expand(2, 3, n, n).contiguous()
    mask = flex.BlockMask.from_kv_blocks(torch.ones_like(n_keys), own, n_keys, wide, BLOCK_SIZE=4)
    assert torch.equal(mask.full_q_num_blocks, n_queries)
    counted = torch.arange(n) < n_queries[..., None]
    assert torch.equal(mask.full_q_indices[counted], queries[counted])


# ---- which path runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def triton(monkeypatch):
    """Call it to say whether Triton is there."""

    def pretend(there):
        why_masked.cache_clear()
        monkeypatch.setattr(module, "_has_triton", lambda: there)

    yield pretend
    why_masked.cache_clear()


def test_what_is_missing_has_a_name(triton):
    bf16 = torch.bfloat16
    triton(True)
    assert why_masked((9, 0), 64, bf16, 64) is None
    assert "compute capability is 7.5, expected 8.0" in why_masked((7, 5), 64, bf16, 64)
    assert "block_size is 48, expected 16" in why_masked((9, 0), 64, bf16, 48)
    assert "head size is 48, expected 32, 64 or 128" in why_masked((9, 0), 48, bf16, 64)
    assert "dtype is torch.float64" in why_masked((9, 0), 64, torch.float64, 64)
    triton(False)
    assert why_masked((9, 0), 64, bf16, 64) == "Triton is not installed"


def test_one_warning_names_the_reason():
    module._warn_masked.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            module._warn_masked("Triton is not installed")
    assert len(told) == 1 and "Triton is not installed" in str(told[0].message)
    module._warn_masked.cache_clear()


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("position", ["none", "rotary"])
def test_module_is_its_parts(kind, position):
    config = preset("tiny").with_(attention=kind, position=position, block_size=4)
    model = Attention(config)
    assert sorted(model.state_dict()) == ["out.weight", "qkv.weight"]
    x = torch.randn(2, 37, config.d_model)
    b, t, d = x.shape
    q, k, v = model.qkv(x).view(b, t, 3, config.n_heads, -1).permute(2, 0, 3, 1, 4)
    if position == "rotary":
        half = q.shape[-1] // 2
        angle = torch.arange(t)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        turn = torch.polar(torch.ones(t, half), angle)
        q, k = (
            torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (half, 2)).contiguous()) * turn).flatten(-2) for z in (q, k)
        )
    if kind == "sparse":
        blocks = select_blocks(q, k, 4, config.top_k_blocks, config.local_blocks, config.first_blocks)
        mask = block_mask(blocks, 4, t)
    else:
        mask = torch.ones(t, t, dtype=torch.bool).tril()
    score = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    expected = model.out((score.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
    assert torch.allclose(model(x), expected, atol=1e-5)


# ---- on a GPU -----------------------------------------------------------------------------------------------------------------


def errors(run, qkv, blocks, block, grad):
    """Worst errors of a path's output and gradient against float64, beside those of the masked reference in the same dtype."""
    found = []
    for f, dtype in (
        (run, qkv.dtype),
        (lambda x: masked(x, blocks, block), qkv.dtype),
        (lambda x: masked(x, blocks, block), None),
    ):
        x = qkv.to(dtype or torch.float64).detach().requires_grad_()
        y = f(x)
        y.backward(grad.to(y.dtype))
        found.append((y.detach().double(), x.grad.double()))
    exact = found.pop()
    return [tuple((a - b).abs().max().item() for a, b in zip(got, exact)) for got in found], exact


class TestOnGPU:
    pytestmark = gpu

    @pytest.mark.parametrize(
        "b, t, h, d, block, dtype",
        [
            (2, 512, 4, 64, 64, torch.bfloat16),
            (3, 700, 4, 64, 64, torch.bfloat16),
            (1, 1000, 2, 64, 64, torch.float16),
            (2, 300, 4, 128, 64, torch.bfloat16),
            (2, 333, 4, 32, 64, torch.bfloat16),
            (2, 300, 4, 32, 16, torch.float32),
            (2, 640, 2, 64, 128, torch.bfloat16),
        ],
    )
    def test_blocks_against_float64(self, b, t, h, d, block, dtype):
        qkv = packed(b, t, h, d, dtype, "cuda")
        grad = torch.randn(b, t, h * d, device="cuda").to(dtype)
        q, k, _ = heads(qkv)
        blocks = select_blocks(q, k, block, 1, 2, 1)
        seen = block_mask(blocks, block, t)
        if t > 4 * block:
            assert seen.sum() < b * h * t * (t + 1) // 2, "nothing was skipped"
        (ours, reference), exact = errors(lambda x: blockwise_attention(x, blocks, block), qkv, blocks, block, grad)
        for ours_error, reference_error, value in zip(ours, reference, exact):
            assert ours_error <= 2 * reference_error + 1e-6 * value.abs().max().item()

    def test_reruns_are_identical_and_nothing_waits(self):
        qkv = packed(2, 900, 4, 64, torch.bfloat16, "cuda").requires_grad_()
        grad = torch.randn(2, 900, 256, device="cuda", dtype=torch.bfloat16)

        def step():
            y = dynamic_sparse_attention(qkv, 64, 4, 2, 1)
            return y, torch.autograd.grad(y, qkv, grad)[0]

        first = step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = [step() for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, b) for run in again for a, b in zip(run, first))

    def test_captured_step_follows_its_input(self):
        shape = (2, 768, 3, 4, 64)
        qkv = packed(2, 768, 4, 64, torch.bfloat16, "cuda").requires_grad_()
        grad = torch.randn(2, 768, 256, device="cuda", dtype=torch.bfloat16)

        def step():
            y = dynamic_sparse_attention(qkv, 64, 2, 1, 1)
            return y, torch.autograd.grad(y, qkv, grad)[0]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, dqkv = step()
        for seed in (5, 6):
            with torch.no_grad():
                qkv.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            expected = step()
            assert torch.equal(y, expected[0]) and torch.equal(dqkv, expected[1])

    @pytest.mark.parametrize("t", [129, 700, 2048, 9000])
    def test_fused_choice_is_the_reference_choice(self, t):
        kernels = pytest.importorskip("loongforge.models.attention_kernels")
        qkv = packed(2, t, 4, 64, torch.bfloat16, "cuda")
        q, k, _ = heads(qkv)
        for top_k, local, first in ((8, 2, 1), (1, 1, 0), (30, 3, 2)):
            n = (t + 63) // 64
            budget = min(top_k, max(n - local - first, 0))
            if kernels.can_choose(n, budget, 64):
                ours, expected = (
                    kernels.choose_blocks(qkv, 64, budget, local, first),
                    select_blocks(q, k, 64, top_k, local, first),
                )
                assert ours.shape == expected.shape
                same = (ours == expected).all(-1).float().mean().item()
                assert same > 0.999  # scores that differ in the last bit may change places
                assert torch.equal((ours >= 0).sum(-1), (expected >= 0).sum(-1))

    def test_wide_budget_is_dense_attention(self):
        qkv = packed(2, 500, 4, 64, torch.bfloat16, "cuda")
        sparse, dense = dynamic_sparse_attention(qkv, 64, 64, 2, 1), dense_attention(qkv)
        assert (sparse - dense).abs().max() < 0.02

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_dense_against_float64(self, deterministic):
        qkv = packed(2, 333, 4, 64, torch.bfloat16, "cuda")
        grad = torch.randn(2, 333, 256, device="cuda", dtype=torch.bfloat16)
        everything = torch.arange(1, device="cuda").view(1, 1, 1, 1).expand(2, 4, 1, 1)
        torch.use_deterministic_algorithms(deterministic)
        try:
            (ours, reference), exact = errors(dense_attention, qkv, everything, 333, grad)
            runs = []
            for _ in range(4 if deterministic else 0):
                x = qkv.clone().requires_grad_()
                dense_attention(x).backward(grad)
                runs.append(x.grad)
        finally:
            torch.use_deterministic_algorithms(False)
        for ours_error, reference_error, value in zip(ours, reference, exact):
            assert ours_error <= 2 * reference_error + 1e-6 * value.abs().max().item()
        assert all(torch.equal(runs[0], r) for r in runs[1:])

    def test_unsupported_block_warns_and_masks(self):
        module._warn_masked.cache_clear()
        qkv = packed(1, 50, 2, 32, torch.float32, "cuda")
        with pytest.warns(RuntimeWarning, match="block_size is 4, expected 16"):
            y = dynamic_sparse_attention(qkv, 4, 2, 1, 1)
        q, k, _ = heads(qkv)
        assert torch.allclose(y, masked(qkv, select_blocks(q, k, 4, 2, 1, 1), 4))
        module._warn_masked.cache_clear()
