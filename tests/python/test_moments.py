# SPDX-License-Identifier: Apache-2.0
"""AdamW's moments in bf16, rounded stochastically ([map] moments_bf16): close to f32's course, and resumed to the bit."""

import copy

import pytest
import torch
from torch import nn

from loongforge import AdamW, CheckpointVault, ParameterMap
from loongforge.mapping import EXP_AVG, EXP_AVG_SQ


def make(moments_bf16=True, state=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 8))
    if state is not None:
        model.load_state_dict(state)
    held = ParameterMap(model, {"moments_bf16": moments_bf16})
    return model, held, AdamW(held, lr=3e-3, weight_decay=0.05)


def steps(model, optimizer, first, last):
    losses = []
    for step in range(first, last):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(32, 24, generator=g)
        loss = (model(x) - x[:, :8].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def moments(held):
    return [held.tensor(b, role).clone() for b in held.blocks for role in (EXP_AVG, EXP_AVG_SQ)]


def test_course():
    (model, held, optimizer), (exact, exact_held, exact_optimizer) = make(), make(False)
    ours, theirs = steps(model, optimizer, 0, 150), steps(exact, exact_optimizer, 0, 150)
    assert all(m.dtype == torch.bfloat16 for m in moments(held)) and all(m.dtype == torch.float32 for m in moments(exact_held))
    assert optimizer.state[held.blocks[0].param]["exp_avg"].data_ptr() == held.tensor(held.blocks[0], EXP_AVG).data_ptr()
    assert held.bytes < exact_held.bytes
    assert ours[0] == theirs[0] and ours[1] == theirs[1], "the first update is that of unrounded moments"
    assert ours != theirs
    assert sum(ours[-20:]) == pytest.approx(sum(theirs[-20:]), rel=0.03)
    assert steps(*make()[::2], 0, 150) == ours


def test_state_dicts_go_on():
    model, held, optimizer = make()
    steps(model, optimizer, 0, 10)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["exp_avg"].dtype == torch.bfloat16
    more = steps(model, optimizer, 10, 30)
    again, again_held, again_optimizer = make(state=weights)
    again_optimizer.load_state_dict(saved)
    assert steps(again, again_optimizer, 10, 30) == more
    assert all(torch.equal(a, b) for a, b in zip(moments(held), moments(again_held), strict=True))
    wide, wide_held, wide_optimizer = make(False, weights)
    wide_optimizer.load_state_dict(saved)
    for b, state in zip(wide_held.blocks, saved["state"].values(), strict=True):
        assert torch.equal(wide_held.tensor(b, EXP_AVG), state["exp_avg"].float())
        assert torch.equal(wide_held.tensor(b, EXP_AVG_SQ), state["exp_avg_sq"].float())


def test_checkpoints_go_on(tmp_path):
    model, held, optimizer = make()
    steps(model, optimizer, 0, 6)
    with CheckpointVault(tmp_path / "v", model=model, optimizer=optimizer) as vault:
        assert vault.save(6)
    more = steps(model, optimizer, 6, 20)
    again, again_held, again_optimizer = make()
    with CheckpointVault(tmp_path / "v", model=again, optimizer=again_optimizer) as vault:
        assert vault.restore()["step"] == 6
    assert steps(again, again_optimizer, 6, 20) == more
