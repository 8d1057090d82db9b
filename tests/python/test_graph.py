# SPDX-License-Identifier: Apache-2.0
"""StepGraph: the steps of a plain loop; captured on a GPU, elsewhere eager with a reason. And the parts of AdamW behind it."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import loongforge  # noqa: E402
from loongforge.graph import StepGraph  # noqa: E402
from loongforge.mapping import ParameterMap  # noqa: E402
from loongforge.models.gr00t_n16 import Gr00tN16, preset  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def net(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)


def data(device, n, b=8):
    g = torch.Generator().manual_seed(3)
    return [
        (torch.randn(b + i % 2, 16, generator=g).to(device), torch.randn(b + i % 2, 4, generator=g).to(device)) for i in range(n)
    ]


def make(device, **options):
    model = net(device)
    optimizer = loongforge.AdamW(ParameterMap(model), lr=1e-2, weight_decay=0.1)

    def forward_backward(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    return model, optimizer, StepGraph(forward_backward, optimizer, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_steps_are_a_plain_loops(device, clip):
    stock = net(device)
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-2, weight_decay=0.1)
    model, ours, step = make(device, clip=clip, warmup=1)
    for i, (x, y) in enumerate(data(device, 9)):
        for o in (optimizer, ours):
            o.param_groups[0]["lr"] = 1e-2 / (1 + i)
        optimizer.zero_grad()
        loss = (stock(x) - y).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(stock.parameters(), clip or math.inf)
        optimizer.step()
        assert step(x, y).item() == pytest.approx(loss.item(), rel=1e-5)
        assert step.norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for p, q in zip(stock.parameters(), model.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert all(ours.state[p]["step"] == 9 for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    if device == "cuda":
        assert step.n_captured == 2 and step.reason is None
    else:
        assert "need CUDA" in step.reason


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_that_is_not_finite_changes_nothing(device):
    model, optimizer, step = make(device, warmup=1)
    for x, y in data(device, 4)[::2]:
        step(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    x, y = data(device, 1)[0]
    step(x * math.nan, y)
    assert math.isnan(step.norm.item())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    assert all(torch.equal(optimizer.state[p]["exp_avg"], m) for p, m in zip(model.parameters(), moments))
    step(x, y)
    assert math.isfinite(step.norm.item()) and not torch.equal(before[0], model[0].weight)


def test_step_counts_are_shared_until_they_differ():
    model = net("cpu")
    held = ParameterMap(model)
    ours, stock = loongforge.AdamW(held, lr=1e-2), net("cpu")
    theirs = torch.optim.AdamW(stock.parameters(), lr=1e-2)
    x = torch.ones(2, 16)
    for i in range(6):
        for m, o in ((model, ours), (stock, theirs)):
            o.zero_grad()
            (m(x) if i % 3 else m[0](x)).square().mean().backward()  # every third step the last layer has no gradient
            o.step()
    for p, q in zip(model.parameters(), stock.parameters()):
        assert ours.state[p]["step"] == theirs.state[q]["step"]
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert ours.state[model[0].weight]["step"] is ours.state[model[0].bias]["step"]
    assert ours.state[model[2].weight]["step"] == 4


@needs_gpu
def test_a_look_at_the_device_breaks_the_capture_and_is_said():
    def steps(capture):
        model = net("cuda")
        optimizer = loongforge.AdamW(ParameterMap(model), lr=1e-3)

        def forward_backward(x):
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach() if loss.item() > -1 else None

        step, x = StepGraph(forward_backward, optimizer, warmup=1, enabled=capture), torch.ones(4, 16, device="cuda")
        return optimizer.state[model[0].weight], [step(x).item() for _ in range(5)]

    with pytest.warns(RuntimeWarning, match="capturing the step failed") as said:
        state, losses = steps(True)
    assert len(said) == 1
    assert losses == steps(False)[1] and len(set(losses)) == 5
    assert state["step"] == 5


@needs_gpu
def test_a_moved_map_is_captured_anew():
    model, optimizer, step = make("cuda", warmup=1)
    x, y = data("cuda", 1)[0]
    for _ in range(3):
        step(x, y)
    optimizer.map.replan()
    assert step.n_captured == 0
    losses = [step(x, y).item() for _ in range(3)]
    assert step.n_captured == 1 and losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loaded_state_is_gone_on_from(device):
    """Step counts of a checkpoint reach a step that was captured before it was loaded."""
    (x, y), results = data(device, 1)[0], []
    for _ in range(2):
        model, optimizer, step = make(device, warmup=1)
        for _ in range(4):
            step(x, y)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        for _ in range(3 if not results else 5):  # the second run goes on for longer, and is then taken back
            step(x, y)
        before = optimizer.generation
        optimizer.load_state_dict(saved)
        model.load_state_dict(weights)
        assert optimizer.generation > before
        for _ in range(4):
            step(x, y)
        assert all(optimizer.state[p]["step"] == 8 for p in model.parameters())
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results))


def gr00t(device, capture, dtype):
    config = preset("tiny").with_(attention="dense")
    model = Gr00tN16(config).to(device)
    held = loongforge.accelerate(model, dtype=dtype)
    optimizer = loongforge.AdamW(held, lr=1e-3)

    def forward_backward(images, tokens):
        with torch.autocast(device, torch.bfloat16, enabled=dtype is not None):
            out = model(images, tokens)
        out.loss.backward()
        return out.loss.detach()

    return config, model, StepGraph(forward_backward, optimizer, clip=1.0, warmup=2, enabled=capture)


@needs_gpu
def test_captured_gr00t_is_eager_gr00t_and_learns_like_f32():
    curves = []
    for device, capture, dtype in (("cuda", True, torch.bfloat16), ("cuda", False, torch.bfloat16), ("cpu", False, None)):
        config, model, step = gr00t(device, capture, dtype)
        g = torch.Generator().manual_seed(1)
        images = torch.randn(8, 3, config.image_size, config.image_size, generator=g).to(device)
        tokens = torch.randint(0, 200, (8, 50), generator=g).to(device)
        losses = []
        for i in range(12):
            model.set_step(i)
            losses.append(step(images, tokens).item())
        curves.append(losses)
        assert step.n_captured == int(capture), step.reason
    assert curves[0] == pytest.approx(curves[1], rel=5e-3)  # attention's backward adds in another order each time
    assert curves[0] == pytest.approx(curves[2], rel=3e-2)


def test_a_saved_state_serves_a_stock_adamw():
    """Step counts that blocks share must not be shared in a state dict: torch's step() would raise them once a parameter."""
    model = net("cpu")
    ours = loongforge.AdamW(ParameterMap(model), lr=1e-2)
    stock_model = net("cpu")
    stock = torch.optim.AdamW(stock_model.parameters(), lr=1e-2)
    x = torch.ones(4, 16)
    for m, o in ((model, ours), (stock_model, stock)):
        m(x).square().mean().backward()
        o.step()
        o.zero_grad()
    stock.load_state_dict(ours.state_dict())
    stock_model(x).square().mean().backward()
    stock.step()
    assert [float(s["step"]) for s in stock.state.values()] == [2, 2, 2, 2]
    assert all(float(ours.state[p]["step"]) == 1 for p in model.parameters())


def test_options_that_would_change_a_step_are_refused():
    model = net("cpu")
    ours = loongforge.AdamW(ParameterMap(model), lr=1e-2)
    state = ours.state_dict()
    state["param_groups"][0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize=True"):
        ours.load_state_dict(state)


@needs_gpu
@pytest.mark.parametrize("inside", [False, True])
def test_a_scale_of_gradients_is_obeyed_by_replays(inside):
    curves = []
    for enabled in (True, False):
        model = net("cuda")
        optimizer = loongforge.AdamW(ParameterMap(model), lr=1e-2)

        def forward_backward(x, y, model=model, optimizer=optimizer):
            loss = (model(x) - y).square().mean()
            loss.backward()
            if inside:
                optimizer.grad_scale = 0.25
            return loss.detach()

        step, (x, y), seen = StepGraph(forward_backward, optimizer, clip=0.05, warmup=1, enabled=enabled), data("cuda", 1)[0], []
        for i in range(6):
            if not inside:
                optimizer.grad_scale = 1.0 / (1 + i)
            seen += [step(x, y).item(), step.norm.item()]
        curves.append(seen)
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
