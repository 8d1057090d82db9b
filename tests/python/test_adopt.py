# SPDX-License-Identifier: Apache-2.0
"""accelerate(model, optimizer=…): a stock AdamW's groups, settings, steps and moments go over, and come back."""

import copy
import warnings

import pytest
import torch
from torch import nn

import loongforge
from loongforge import AdamW, ParameterMap, accelerate, undo
from loongforge.mapping import map_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 4, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).square().mean()


def net(dtype=None):
    torch.manual_seed(0)
    return Net().to(dtype) if dtype else Net()


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 3e-3, "betas": (0.8, 0.95)},
    ]


def stock_adamw(model):
    return torch.optim.AdamW(groups(model), lr=1e-2, eps=1e-7, weight_decay=0.0)


def train(model, optimizer, steps, first=0, scheduler=None):
    losses = []
    for i in range(first, first + steps):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i)).to(model.head.weight.dtype)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def test_a_fresh_optimizer_goes_over_with_its_groups():
    stock, ours = net(), net()
    given = stock_adamw(ours)
    held = accelerate(ours, optimizer=given)
    assert type(held) is ParameterMap and type(held.optimizer) is AdamW
    assert held.optimizer.param_groups[0]["weight_decay"] == 0.3 and held.optimizer.param_groups[1]["betas"] == (0.8, 0.95)
    assert held.optimizer.defaults == {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-7, "weight_decay": 0.0}
    want = train(stock, stock_adamw(stock), 12)
    assert train(ours, held.optimizer, 12) == pytest.approx(want, rel=1e-5)


def test_steps_and_moments_go_over_and_come_back():
    """Six stock steps, six of ours, six stock ones again, as eighteen stock ones."""
    stock, ours = net(), net()
    want = train(stock, stock_adamw(stock), 18)
    given = stock_adamw(ours)
    got = train(ours, given, 6)
    held = accelerate(ours, optimizer=given)
    assert not given.state  # no second copy of the moments
    got += train(ours, held.optimizer, 6, 6)
    assert all(float(s["step"]) == 12 for s in held.optimizer.state.values())
    undo(ours)
    assert len(given.state) == len(list(ours.parameters())) and map_of(ours) is None
    got += train(ours, given, 6, 12)
    assert got == pytest.approx(want, rel=1e-5)
    assert list(given.state_dict()["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]


def test_bf16_moments_become_f32_and_bf16_again():
    ours = net(torch.bfloat16)
    given = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    train(ours, given, 3)
    before = {p: s["exp_avg"].clone() for p, s in given.state.items()}
    held = accelerate(ours, optimizer=given)
    for p, moment in before.items():
        own = held.optimizer.state[p]["exp_avg"]
        assert own.dtype == torch.float32 and torch.equal(own, moment.float())
    train(ours, held.optimizer, 2, 3)
    undo(ours)
    assert all(s["exp_avg"].dtype == torch.bfloat16 and float(s["step"]) == 5 for s in given.state.values())


def test_a_scheduler_of_the_stock_optimizer_goes_on():
    stock, ours = net(), net()
    results = []
    for model, takes in ((stock, False), (ours, True)):
        optimizer = stock_adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if takes:
            optimizer = accelerate(model, optimizer=optimizer).optimizer
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "scheduler.step() before optimizer.step()", for one
            results.append(train(model, optimizer, 8, scheduler=scheduler))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 9)
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_the_stock_optimizer_does_not_step_meanwhile():
    ours = net()
    given = stock_adamw(ours)
    accelerate(ours, optimizer=given)
    with pytest.raises(RuntimeError, match="handed over to loongforge.AdamW; hint: step map.optimizer"):
        given.step()
    undo(ours)
    train(ours, given, 1)


def test_frozen_parameters_wait_in_their_group():
    stock, ours = net(), net()
    for model in (stock, ours):
        model.layers[0].requires_grad_(False)
    given = stock_adamw(ours)
    optimizer = stock_adamw(stock)
    held = accelerate(ours, optimizer=given)
    want, got = train(stock, optimizer, 4), train(ours, held.optimizer, 4)
    for model in (stock, ours):
        model.layers[0].requires_grad_(True)
    held.replan()
    want, got = want + train(stock, optimizer, 4, 4), got + train(ours, held.optimizer, 4, 4)
    assert got == pytest.approx(want, rel=1e-5)
    held.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert float(held.optimizer.state[ours.layers[0].weight]["step"]) == 4


def test_a_group_added_to_the_stock_optimizer_is_trained():
    ours = net()
    given = torch.optim.AdamW(ours.layers.parameters(), lr=1e-2)
    held = accelerate(ours, optimizer=given)
    before = ours.head.weight.detach().clone()
    train(ours, held.optimizer, 1)
    assert torch.equal(ours.head.weight, before)
    given.add_param_group({"params": [ours.head.weight]})
    train(ours, held.optimizer, 1)
    assert not torch.equal(ours.head.weight, before)


def test_what_is_refused_leaves_the_model_as_it_was():
    ours = net()
    strange = [nn.Parameter(torch.zeros(3, 7))]

    class Mine(torch.optim.AdamW):
        pass

    for optimizer, error, text in (
        (
            torch.optim.SGD(ours.parameters(), lr=0.1),
            TypeError,
            "optimizer is a SGD, expected a torch.optim.AdamW; hint: leave it out",
        ),
        (torch.optim.Adam(ours.parameters()), TypeError, "a Adam, expected"),
        (Mine(ours.parameters()), TypeError, "a Mine, expected"),
        (torch.optim.AdamW, TypeError, "a type, expected"),
        (torch.optim.AdamW(ours.parameters(), amsgrad=True), ValueError, "amsgrad=True, which loongforge.AdamW does not do"),
        (torch.optim.AdamW(ours.parameters(), maximize=True), ValueError, "maximize=True"),
        (torch.optim.AdamW([*ours.parameters(), *strange]), ValueError, r"1 parameters that are not the model's, .* \(3, 7\)"),
    ):
        with pytest.raises(error, match=text):
            accelerate(ours, optimizer=optimizer)
        assert map_of(ours) is None


def test_one_optimizer_for_a_map():
    ours = net()
    given = stock_adamw(ours)
    held = accelerate(ours, optimizer=given)
    assert accelerate(ours, optimizer=given) is held and accelerate(ours, optimizer=held.optimizer) is held
    with pytest.raises(RuntimeError, match="the map has an optimizer already"):
        accelerate(ours, optimizer=stock_adamw(ours))
    other = net()
    loongforge.NexusSync(model=other)
    with pytest.raises(RuntimeError, match="holds weights and gradients only"):
        accelerate(other, optimizer=stock_adamw(other))


def test_the_stock_ones_state_is_not_silently_empty():
    model = torch.nn.Linear(8, 8)
    stock = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stock, 0.4)
    held = loongforge.accelerate(model, optimizer=stock)
    with pytest.raises(RuntimeError, match="map.optimizer.state_dict"):
        stock.state_dict()
    with pytest.raises(RuntimeError, match="map.optimizer.state_dict"):
        stock.load_state_dict(held.optimizer.state_dict())
    held.optimizer.load_state_dict(held.optimizer.state_dict())
    model(torch.ones(2, 8)).sum().backward()
    held.optimizer.step()
    scheduler.step()
    assert held.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)  # schedulers of the stock one go on after a load
    undo(model)
    assert all(float(s["step"]) == 1 for s in stock.state_dict()["state"].values())
