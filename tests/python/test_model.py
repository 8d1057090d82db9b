# SPDX-License-Identifier: Apache-2.0
"""GR00T N1.6: mathematics of the reference model, its router, its sparse attention and its initialisation."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from peers import stock_name, stock_of  # noqa: E402
from torch import nn  # noqa: E402

from loongforge.models.attention import block_mask, select_blocks, sparse_attention  # noqa: E402
from loongforge.models.config import EXPERT_SIZES, PRESETS  # noqa: E402
from loongforge.models.gr00t_n16 import Gr00tN16, Gr00tN16Config, preset  # noqa: E402
from loongforge.models.moe import Expert, expert_mixture  # noqa: E402
from loongforge.models.noise import gumbel_noise, philox4x32  # noqa: E402


def shrunken(**changes):
    """n16 with every size cut, nothing else changed."""
    sizes = dict(
        vocab_size=96,
        d_model=32,
        n_layers=2,
        n_heads=4,
        expert_sizes=tuple(s // 64 for s in EXPERT_SIZES),
        image_size=16,
        patch_size=8,
        max_seq_len=64,
        block_size=4,
        top_k_blocks=2,
        init_std=0.2,
    )
    return preset("n16").with_(**{**sizes, **changes})


def batch(config, b=3, t=21, seed=1):
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(b, 3, config.image_size, config.image_size, generator=g)
    return images, torch.randint(0, config.vocab_size, (b, t), generator=g)


def gradients(model):
    return {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}


def assert_same_gradients(a, b, tolerance=2e-5):
    assert a.keys() == b.keys()
    for name in a:
        scale = a[name].abs().max().clamp(min=1e-6)
        assert (a[name] - b[name]).abs().max() <= tolerance * scale, name


# ---- presets ---------------------------------------------------------------------------------------------------


def test_presets():
    with torch.device("meta"):
        count = {name: sum(p.numel() for p in Gr00tN16(name).parameters()) for name in PRESETS}
    assert 1.60e9 < count["n16"] < 1.66e9
    assert 80e6 < count["small"] < 120e6
    assert 1e6 < count["tiny"] < 9e6
    for config in PRESETS.values():
        sizes = config.expert_sizes
        assert len(sizes) == 16 and max(sizes) / min(sizes) == pytest.approx(3.2)
        assert [e for e in range(16) if sizes[e] == max(sizes)] == [0, 1, 7, 12]


def test_unknown_preset_and_bad_config_name_the_value():
    with pytest.raises(ValueError, match=r"^unknown preset 'huge', expected one of: tiny, small, n16$"):
        preset("huge")
    with pytest.raises(ValueError, match="n_heads is 7, expected a divisor of d_model=32"):
        shrunken(n_heads=7)
    with pytest.raises(ValueError, match="attention is 'fast', expected sparse or dense"):
        shrunken(attention="fast")


def test_too_long_sequence_is_refused():
    config = shrunken(max_seq_len=24)
    with pytest.raises(ValueError, match="4 patches . 21 tokens, expected at most max_seq_len=24"):
        Gr00tN16(config)(*batch(config))


# ---- noise -----------------------------------------------------------------------------------------------------

PHILOX_VECTORS = [  # published with Random123: counter, key, output of Philox4x32-10
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, expected", PHILOX_VECTORS)
def test_philox_published_vectors(counter, key, expected):
    words = philox4x32([torch.tensor([c]) for c in counter], key)
    assert [w.item() for w in words] == expected


def test_gumbel_noise_follows_its_definition():
    seed, step, layer, experts = (7 << 32) | 5, 3, 2, 10
    tokens = torch.tensor([0, 1, (9 << 32) | 4, 12345])
    noise = gumbel_noise(seed, step, layer, tokens, experts)
    assert noise.shape == (4, experts) and noise.dtype == torch.float32
    for row, token in enumerate(tokens.tolist()):
        for e in range(experts):
            counter = [token & 0xFFFFFFFF, token >> 32, step, layer * 64 + e // 4]
            word = philox4x32([torch.tensor([c]) for c in counter], [5, 7])[e % 4]
            u = (word.item() >> 8) * 2.0**-24 + 2.0**-25
            expected = -torch.log(-torch.log(torch.tensor(u, dtype=torch.float64)))
            assert noise[row, e].item() == pytest.approx(expected.item(), rel=1e-6)


def test_gumbel_noise_is_keyed_and_gumbel():
    tokens = torch.arange(20000)
    noise = gumbel_noise(1, 0, 0, tokens, 16)
    assert torch.equal(noise[777:900], gumbel_noise(1, 0, 0, tokens[777:900], 16))
    for other in (
        gumbel_noise(2, 0, 0, tokens, 16),
        gumbel_noise(1, 1, 0, tokens, 16),
        gumbel_noise(1, 0, 1, tokens, 16),
    ):
        assert (noise == other).float().mean() < 1e-3
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)


# ---- the yardstick ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_dense_n16_without_balance_loss_is_the_yardstick(training):
    config = shrunken(attention="dense", balance_weight=0.0, seed=11)
    model = Gr00tN16(config).train(training)
    stock = stock_of(model).train(training)
    images, tokens = batch(config)
    t = config.n_patches + tokens.shape[1]
    index = (torch.arange(3)[:, None] * config.max_seq_len + torch.arange(t)).flatten()
    noise = [gumbel_noise(11, 0, layer, index, 16) for layer in range(config.n_layers)] if training else None
    out, expected = model(images, tokens), stock(images, tokens, noise)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert out.loss_sum.item() / out.n_tokens.item() == pytest.approx(expected.item(), rel=1e-6)
    out.loss.backward()
    expected.backward()
    theirs = gradients(stock)
    assert_same_gradients({stock_name(k): g for k, g in gradients(model).items()}, theirs)
    assert all(g.abs().max() > 0 for n, g in theirs.items() if "experts" not in n)


# ---- sparse attention ------------------------------------------------------------------------------------------


def brute_force_selection(q, k, block, top_k, local, first):
    """One head: q, k: (t, d) -> for each query block the set of key blocks, straight from the definition."""
    t = q.shape[0]
    kept = []
    for i in range((t + block - 1) // block):
        fixed = {j for j in range(i + 1) if i - j < local or j < first}
        rest = [j for j in range(i) if j not in fixed]
        pooled = q[max(0, i * block - block + 1) : i * block + 1].mean(0)
        rest.sort(key=lambda j: -(pooled @ k[j * block : (j + 1) * block].mean(0)).item())
        kept.append(fixed | set(rest[:top_k]))
    return kept


@pytest.mark.parametrize("t", [1, 4, 21, 24, 31])
@pytest.mark.parametrize("top_k, local, first", [(2, 1, 1), (0, 2, 0), (3, 2, 2), (9, 1, 1)])
def test_selection_and_attention_against_brute_force(t, top_k, local, first):
    torch.manual_seed(0)
    block = 4
    q, k, v = torch.randn(3, 2, 3, t, 8)
    blocks = select_blocks(q, k, block, top_k, local, first)
    y = sparse_attention(q, k, v, blocks, block)
    for b in range(2):
        for h in range(3):
            kept = brute_force_selection(q[b, h], k[b, h], block, top_k, local, first)
            for i, row in enumerate(blocks[b, h].tolist()):
                chosen = [j for j in row if j >= 0]
                assert chosen == sorted(kept[i]) and row[len(chosen) :] == [-1] * (len(row) - len(chosen))
            for s in range(t):
                keys = [p for p in range(s + 1) if p // block in kept[s // block]]
                weights = torch.softmax(k[b, h, keys] @ q[b, h, s] / 8**0.5, 0)
                assert torch.allclose(y[b, h, s], weights @ v[b, h, keys], atol=1e-5)


@pytest.mark.parametrize("t", [21, 24])
def test_sparse_equals_dense_when_top_k_covers_all_blocks(t):
    config = shrunken(top_k_blocks=64)
    images, tokens = batch(config, t=t)
    results = []
    for attention in ("sparse", "dense"):
        model = Gr00tN16(config.with_(attention=attention))
        out = model(images, tokens)
        out.loss.backward()
        results.append((out.loss.item(), gradients(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert_same_gradients(results[0][1], results[1][1])


def test_small_budget_really_drops_blocks():
    q, k, _ = torch.randn(3, 1, 2, 64, 8)
    seen = block_mask(select_blocks(q, k, 4, 2, 1, 1), 4, 64)
    assert seen.any(-1).all() and seen[0, 0, -1].sum() == 16


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_later_tokens_and_padding_do_not_reach_earlier_ones(attention):
    config = shrunken(attention=attention)
    model = Gr00tN16(config).eval()
    images, tokens = batch(config, t=30)
    before = model(images, tokens, return_logits=True).logits
    for cut in (1, 13, 14, 15, 29):  # 13..15 lie around a block edge
        changed = tokens.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % config.vocab_size
        after = model(images, changed, return_logits=True).logits
        assert torch.allclose(before[:, :cut], after[:, :cut], atol=1e-5)
        assert not torch.allclose(before[:, cut:], after[:, cut:], atol=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_padding_changes_neither_loss_nor_balance_nor_gradient(training):
    config = shrunken()
    images, tokens = batch(config, t=18)
    padded = F.pad(tokens, (0, 9), value=5)
    mask = F.pad(torch.ones_like(tokens), (0, 9))
    results = []
    for text, attention_mask in ((tokens, None), (padded, mask)):
        model = Gr00tN16(config).train(training)
        out = model(images, text, attention_mask=attention_mask)
        out.loss.backward()
        results.append((out, gradients(model)))
    (a, ga), (b, gb) = results
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-6)
    assert a.balance_loss.item() == pytest.approx(b.balance_loss.item(), rel=1e-6)
    assert torch.equal(a.expert_counts, b.expert_counts) and a.n_tokens == b.n_tokens
    assert_same_gradients(ga, gb)


def test_rotary_positions_see_order():
    config = shrunken(position="rotary", attention="dense", n_layers=1)
    images, tokens = batch(config, b=1, t=8)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    tokens[:, :2] = torch.tensor([3, 4])
    swapped[:, :2] = torch.tensor([4, 3])
    last = {}
    for position in ("none", "rotary"):
        model = Gr00tN16(config.with_(position=position)).eval()
        last[position] = [model(images, x, return_logits=True).logits[:, -1] for x in (tokens, swapped)]
    assert torch.allclose(*last["none"], atol=1e-5) and not torch.allclose(*last["rotary"], atol=1e-4)


# ---- experts and router ----------------------------------------------------------------------------------------


def test_expert_mixture_against_a_loop():
    torch.manual_seed(0)
    experts = nn.ModuleList(Expert(8, ff) for ff in (4, 6, 8, 10))
    x = torch.randn(19, 8, requires_grad=True)
    ids = torch.randint(0, 5, (19, 2))  # 4 is "no expert"
    ids[ids == 2] = 3  # expert 2 gets no token
    ids[:3] = 4
    w = torch.rand(19, 2, requires_grad=True)
    y, counts = expert_mixture(x, ids, w, experts)
    expected = torch.stack(
        [sum((w[n, j] * experts[e](x[n]) for j, e in enumerate(ids[n].tolist()) if e < 4), torch.zeros(8)) for n in range(19)]
    )
    assert torch.allclose(y, expected, atol=1e-6)
    assert counts.tolist() == [(ids == e).sum().item() for e in range(4)]
    probe = torch.randn_like(y)
    leaves = [x, w, *[p for e in (0, 1, 3) for p in experts[e].parameters()]]
    for ours, theirs in zip(
        torch.autograd.grad((y * probe).sum(), leaves), torch.autograd.grad((expected * probe).sum(), leaves)
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_all_slots_without_an_expert():
    experts = nn.ModuleList(Expert(8, 4) for _ in range(2))
    y, counts = expert_mixture(torch.randn(3, 8), torch.full((3, 1), 2), torch.ones(3, 1), experts)
    assert torch.equal(y, torch.zeros(3, 8)) and counts.tolist() == [0, 0]


def test_temperature_schedule():
    config = shrunken(tau_start=1.0, tau_end=0.25, tau_decay_steps=100)
    taus = [config.tau(s) for s in (0, 50, 100, 1000)]
    assert taus == pytest.approx([1.0, 0.5, 0.25, 0.25])
    images, tokens = batch(config)
    model = Gr00tN16(config)
    at = {s: model(images, tokens, step=s).loss.item() for s in (0, 100)}
    model.set_step(100)
    assert model(images, tokens).loss.item() == at[100] != at[0]


def test_noise_in_training_only_and_repeatable():
    config = shrunken()
    images, tokens = batch(config)
    model = Gr00tN16(config)
    train = [model(images, tokens).loss.item() for _ in range(2)]
    evaluation = [model.eval()(images, tokens, step=0).loss.item() for _ in range(2)]
    assert train[0] == train[1] and evaluation[0] == evaluation[1] and train[0] != evaluation[0]


def test_noise_fades():
    config = shrunken(noise_decay_steps=10)
    assert [config.noise_scale(s) for s in (0, 5, 10, 99)] == [1.0, 0.5, 0.0, 0.0]
    assert shrunken().noise_scale(10**6) == 1.0 and shrunken(router_noise=False).noise_scale(0) == 0.0
    model = Gr00tN16(config)
    images, tokens = batch(config)
    assert model(images, tokens, step=10).loss.item() == model.eval()(images, tokens, step=10).loss.item()


def test_even_routing_gives_balance_one():
    config = shrunken(router_noise=False)
    model = Gr00tN16(config)
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.router.weight.zero_()
    out = model(*batch(config))
    assert out.balance_loss.item() == pytest.approx(1.0, abs=1e-6)
    assert out.expert_counts.shape == (2, 16) and out.expert_counts.sum() == 2 * 2 * 3 * 25
    assert torch.equal(model.last_expert_counts, out.expert_counts)


def test_two_ranks_sum_to_one_process():
    """Uneven ranks (2 + 1 samples, different padding): summed gradients and shared values equal one process."""
    config = shrunken(balance_weight=0.5)
    images, tokens = batch(config, t=24)
    mask = torch.ones_like(tokens)
    mask[0, 17:] = 0
    mask[2, 9:] = 0
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(3)) < 0.4, -100)
    ids = torch.arange(3) + 40
    whole = Gr00tN16(config)
    single = whole(images, tokens, labels, mask, sample_ids=ids)
    single.loss.backward()

    ranks = [slice(0, 2), slice(2, 3)]
    stats = []
    for rank in ranks:
        probe = Gr00tN16(config, reduce_stats=lambda x: stats.append(x.clone()) or x)
        probe(images[rank], tokens[rank], labels[rank], mask[rank], sample_ids=ids[rank])
    assert len(stats) == 2, "one reduction a forward"
    total, outs = None, []
    for rank in ranks:
        model = Gr00tN16(config, reduce_stats=lambda x: stats[0] + stats[1])
        out = model(images[rank], tokens[rank], labels[rank], mask[rank], sample_ids=ids[rank])
        out.loss.backward()
        outs.append(out)
        g = gradients(model)
        total = g if total is None else {n: total[n] + g[n] for n in g}
    assert_same_gradients(gradients(whole), total)
    assert sum(o.n_tokens for o in outs) == single.n_tokens == outs[0].n_tokens_global
    assert sum(o.loss_sum for o in outs).item() == pytest.approx(single.loss_sum.item(), rel=1e-6)
    assert torch.equal(sum(o.expert_counts for o in outs), single.expert_counts)
    for out in outs:
        assert out.balance_loss.item() == pytest.approx(single.balance_loss.item(), rel=1e-6)


def test_labels_select_what_is_trained_on():
    config = shrunken()
    images, tokens = batch(config)
    labels = torch.full_like(tokens, -100)
    labels[:, 5] = tokens[:, 5]
    out = Gr00tN16(config).eval()(images, tokens, labels, return_logits=True)
    expected = F.cross_entropy(out.logits[:, 4], tokens[:, 5], reduction="sum")
    assert out.n_tokens == 3 and out.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    nothing = Gr00tN16(config)(images, tokens, torch.full_like(tokens, -100))
    assert nothing.n_tokens == 0 and nothing.loss.isfinite()


# ---- life of the module ----------------------------------------------------------------------------------------


def test_initialisation_depends_on_the_seed_alone():
    config = shrunken()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        a = Gr00tN16(config).state_dict()
        torch.set_num_threads(2)
        torch.manual_seed(2)
        b = Gr00tN16(config).state_dict()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[n], b[n]) for n in a)
    other = Gr00tN16(config.with_(seed=1)).state_dict()
    assert not torch.equal(a["embed.weight"], other["embed.weight"])
    assert not torch.equal(a["layers.0.moe.experts.0.up.weight"], a["layers.0.moe.experts.1.up.weight"])


def test_autocast_keeps_router_and_loss_in_float32():
    config = shrunken()
    model = Gr00tN16(config)
    images, tokens = batch(config)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(images, tokens)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    reference = Gr00tN16(config)(images, tokens).loss.item()
    assert out.loss.item() == pytest.approx(reference, rel=0.1)
    assert all(g.isfinite().all() for g in gradients(model).values())


def test_tiny_learns_one_batch():
    config = Gr00tN16Config(**{**preset("tiny").__dict__, "n_layers": 2})
    model = Gr00tN16(config)
    images, tokens = batch(config, b=4, t=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        loss = model(images, tokens, step=step).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
