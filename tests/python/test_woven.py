# SPDX-License-Identifier: Apache-2.0
"""GR00T N1.6 with fused layers (woven.py) against the plain model, on the CPU's kernels: what a GPU runs, in f32."""

import copy
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from test_model import batch, gradients, shrunken  # noqa: E402

import loongforge  # noqa: E402
from loongforge.mapping import ParameterMap  # noqa: E402
from loongforge.models.gr00t_n16 import Gr00tN16  # noqa: E402
from loongforge.woven import WovenGr00tN16, unweave_gr00t, weave_gr00t  # noqa: E402


def sizes(**changes):
    return shrunken(d_model=64, expert_sizes=tuple(8 * (1 + i % 5) for i in range(16)), seed=11, **changes)


def woven(config, **options):
    model = Gr00tN16(config)
    held = ParameterMap(model, **options)
    weave_gr00t(model, held)
    return model, held


def assert_close(a, b, tolerance=5e-5):
    assert a.keys() == b.keys()
    for name in a:
        scale = b[name].abs().max().clamp(min=1e-6)
        assert (a[name] - b[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_losses_counts_and_gradients(training, attention):
    config = sizes(attention=attention, position="both")
    plain, (model, _) = Gr00tN16(config).train(training), woven(config)
    model.train(training)
    images, tokens = batch(config)
    mask = torch.ones_like(tokens)
    mask[1, 13:] = 0
    for step in (0, 7):
        results = []
        for m in (plain, model):
            m.zero_grad()
            m.set_step(step)
            out = m(images, tokens, attention_mask=mask)
            out.loss.backward()
            results.append((out, gradients(m)))
        (a, ga), (b, gb) = results
        assert b.loss.item() == pytest.approx(a.loss.item(), rel=2e-6)
        assert b.balance_loss.item() == pytest.approx(a.balance_loss.item(), rel=1e-6)
        assert torch.equal(a.expert_counts, b.expert_counts) and a.n_tokens == b.n_tokens
        assert_close(gb, ga)


def test_micro_steps_add_up_and_reruns_are_identical():
    config = sizes(attention="dense")
    plain, (model, _) = Gr00tN16(config), woven(config)
    images, tokens = batch(config, b=4)
    found = []
    for m in (plain, model, model):
        m.zero_grad()
        for part in (slice(0, 1), slice(1, 4)):
            m(images[part], tokens[part]).loss.backward()
        found.append(gradients(m))
    assert_close(found[1], found[0])
    assert all(torch.equal(found[1][n], found[2][n]) for n in found[1])


def test_h_kept_and_made_again_give_the_same_bits():
    config = sizes(attention="dense")
    model, _ = woven(config)
    images, tokens = batch(config)
    plans, found, saved = model.__dict__["_weaving"].sets, [], []
    assert all(plan.keep_h for plan in plans)
    for keep in (True, False):
        for plan in plans:
            plan.keep_h = keep
        model.zero_grad()
        tensors = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=tensors: kept.append(t) or t, lambda t: t):
            loss = model(images, tokens).loss
        loss.backward()
        found.append(gradients(model))
        saved.append(len(tensors))
    assert saved[0] - saved[1] == len(model.layers)
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_training_follows_the_plain_model():
    config = sizes(attention="dense")
    plain, (model, held) = Gr00tN16(config), woven(config)
    optimizers = torch.optim.AdamW(plain.parameters(), lr=1e-3), loongforge.AdamW(held, lr=1e-3)
    images, tokens = batch(config, b=4)
    losses = [[], []]
    for step in range(10):
        for m, optimizer, kept in zip((plain, model), optimizers, losses):
            m.set_step(step)
            optimizer.zero_grad()
            out = m(images, tokens)
            out.loss.backward()
            optimizer.step()
            kept.append(out.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    assert losses[0][-1] < losses[0][0]


def test_frozen_experts_and_a_frozen_rest():
    config = sizes(attention="dense")
    for frozen_experts in (True, False):
        plain, model = Gr00tN16(config), Gr00tN16(config)
        for m in (plain, model):
            for name, p in m.named_parameters():
                p.requires_grad_((".experts." in name) != frozen_experts)
        weave_gr00t(model, ParameterMap(model))
        images, tokens = batch(config)
        for m in (plain, model):
            m(images, tokens).loss.backward()
        assert_close(gradients(model), gradients(plain))
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_some_frozen_experts_are_refused_and_nothing_changes():
    config = sizes()
    model = Gr00tN16(config)
    model.layers[0].moe.experts[3].up.weight.requires_grad_(False)
    held = ParameterMap(model)
    with pytest.raises(NotImplementedError, match="frozen"):
        weave_gr00t(model, held)
    assert type(model) is Gr00tN16


def test_copies_and_undo():
    config = sizes(attention="dense")
    model, held = woven(config)
    images, tokens = batch(config)
    loss = model(images, tokens).loss
    twin = copy.deepcopy(model)
    assert twin(images, tokens).loss.item() == pytest.approx(loss.item(), rel=2e-6)
    names = list(model.state_dict())
    unweave_gr00t(model)
    held.release()
    assert type(model) is Gr00tN16 and list(model.state_dict()) == names
    assert model(images, tokens).loss.item() == pytest.approx(loss.item(), rel=2e-6)
    assert isinstance(twin, WovenGr00tN16)


def test_replanning_moves_the_plans():
    config = sizes(attention="dense")
    plain, (model, held) = Gr00tN16(config), woven(config)
    held.set_pool_size("expert_3", 1 << 20)
    images, tokens = batch(config)
    for m in (plain, model):
        m(images, tokens).loss.backward()
    assert_close(gradients(model), gradients(plain))


def test_a_part_of_the_experts_frozen_runs_unfused_until_it_is_not():
    config = sizes(attention="dense")
    plain, (model, held) = Gr00tN16(config), woven(config)
    images, tokens = batch(config)
    optimizer = loongforge.AdamW(held, lr=1e-3)
    weights = [m.layers[0].moe.experts[1].gate.weight for m in (plain, model)]
    for trained in (False, True):
        for weight in weights:
            weight.requires_grad_(trained)
        with nullcontext() if trained else pytest.warns(RuntimeWarning, match="unfused since the map was planned anew: some of"):
            held.replan()
        assert (model._weaving.sets is None) != trained
        for m in (plain, model):
            m.zero_grad()
            m(images, tokens).loss.backward()
        assert_close(gradients(model), gradients(plain))
    optimizer.step()  # what listened to the map behind the plans has heard of both moves


def test_two_forwards_before_a_backward():
    config = sizes(attention="dense")
    plain, (model, _) = Gr00tN16(config), woven(config)
    images, tokens = batch(config, b=4)
    for m in (plain, model):
        a, b = m(images[:2], tokens[:2]), m(images[2:], tokens[2:])
        (a.loss + b.loss).backward()
    assert_close(gradients(model), gradients(plain))


def test_edits_between_forward_and_backward_are_an_error():
    config = sizes(attention="dense")
    model, _ = woven(config)
    weight = model.layers[1].moe.experts[2].down.weight
    loss = model(*batch(config)).loss
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="layers.1.moe.experts.2.down.weight was changed between forward and backward"):
        loss.backward()


def test_hooks_on_an_experts_weight_are_refused():
    config = sizes(attention="dense")
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model, _ = woven(config)
        hook = getattr(model.layers[0].moe.experts[3].up.weight, register)(lambda grad: None)
        with pytest.raises(RuntimeError, match="layers.0.moe.experts.3.up.weight has a hook on its gradient"):
            model(*batch(config))
        hook.remove()
        model(*batch(config)).loss.backward()


def test_hooks_on_a_layers_parts_run():
    config, calls = sizes(attention="dense"), []
    model, _ = woven(config)
    images, tokens = batch(config)
    before = model(images, tokens).loss.item()
    model.layers[1].moe.experts[0].register_forward_hook(lambda *args: calls.append(1))
    with pytest.warns(RuntimeWarning, match="layers.1.moe.experts.0 has hooks"):
        after = model(images, tokens).loss
    after.backward()
    assert calls and after.item() == pytest.approx(before, rel=2e-6)


def test_a_schedule_that_moves_on_before_backward():
    """Each forward's backward uses the temperature of that forward."""
    config = sizes(attention="dense", tau_decay_steps=10)
    plain, (model, _) = Gr00tN16(config), woven(config)
    images, tokens = batch(config)
    for m in (plain, model):
        m.set_step(0)
        loss = m(images, tokens).loss
        m.set_step(9)
        (loss + m(images, tokens).loss).backward()
    assert_close(gradients(model), gradients(plain))


def test_noise_is_back_when_training_is():
    model, _ = woven(sizes(attention="dense"))
    model.set_step(3)
    there = bytes(model._weaving.schedule.tolist())
    model.eval()
    model(*batch(model.config))
    assert bytes(model._weaving.schedule.tolist()) != there
    model.train()
    assert bytes(model._weaving.schedule.tolist()) == there
