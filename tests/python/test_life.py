# SPDX-License-Identifier: Apache-2.0
"""What happens around a training step: memory that outlives its owner, failed passes, several optimizers, copies, checkpoints."""

import copy
import gc
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import loongforge
from loongforge import _C, AdamW, CheckpointVault, DataFusionLoader, LMDataset, NexusSync, ParameterMap, accelerate
from loongforge.mapping import map_of
from loongforge.models.gr00t_n16 import Gr00tN16, preset


def net(dtype=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    return model.to(dtype) if dtype else model


def backward(model, x=None):
    p = next(model.parameters())
    x = torch.ones(4, 16, dtype=p.dtype) if x is None else x
    model(x).square().sum().backward()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    path = tmp_path_factory.mktemp("set") / "scenes"
    _C.pack_scenes(str(path), {"scenes": 64})
    return path


@pytest.mark.parametrize("n", [16, 512, 3000])
def test_a_strided_gradient_is_taken_whole(n):
    model = nn.Linear(n, n, bias=False)
    held = ParameterMap(model)
    g = torch.randn(n, n)
    model.weight.grad = g.t()
    held.gradients_present()
    assert torch.equal(held.blocks[0].grad, g.t())


def test_strided_tokens_give_the_same_noise():
    from loongforge.loom import WovenMixture
    from loongforge.models.config import preset

    layer = WovenMixture(preset("tiny"), 0)
    x, token = torch.randn(1, 300, 128), torch.arange(300)
    strided, plain = (layer(x, t, None, 0, 1.0)[1].counts for t in (token.repeat_interleave(2)[::2], token))
    assert torch.equal(strided, plain) and not torch.equal(plain, layer(x, token + 1, None, 0, 1.0)[1].counts)


def test_a_batch_keeps_its_memory(scenes):
    options = dict(image_size=64, seq_len=192)
    loader = DataFusionLoader(LMDataset(scenes), 8, **options)
    state = loader.state_dict()
    batch = loader.next()
    tokens, images = batch.tokens.clone(), batch.images.clone()
    again = DataFusionLoader(LMDataset(scenes), 8, **options).next()  # its loader is gone at once
    loader.load_state_dict(state)
    loader.close()
    gc.collect()
    junk = [torch.full((1 << 18,), float(i)) for i in range(40)]
    assert torch.equal(batch.tokens, tokens) and torch.equal(batch.images, images) and torch.equal(again.tokens, tokens)
    del junk


def test_a_stock_optimizer_on_bf16_trains_or_is_refused():
    model = net(torch.bfloat16)
    sync = NexusSync(model)  # alone: gradients in the weight's dtype
    before = model[0].weight.detach().clone()
    backward(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert (model[0].weight != before).any()
    sync.close()
    model = net(torch.bfloat16)
    ParameterMap(model)
    backward(model)
    with pytest.raises(RuntimeError, match="SGD cannot see the gradient of 0.weight"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_optimizer_state_round_trip_is_exact_under_bf16():
    held = ParameterMap(net(torch.bfloat16))
    optimizer = AdamW(held, lr=1e-3)
    for _ in range(3):
        backward(held.model)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = AdamW(ParameterMap(net(torch.bfloat16)), lr=1e-3)
    other.load_state_dict(saved)
    for a, b in zip(optimizer.state.values(), other.state.values()):
        assert (
            torch.equal(a["exp_avg"], b["exp_avg"]) and torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) and a["step"] == b["step"]
        )
    optimizer.load_state_dict(dict(saved, state={}))
    assert all(s["step"] == 0 and not s["exp_avg"].any() for s in optimizer.state.values())


def test_a_failed_backward_is_forgotten():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise ValueError("planted")

    model = net()
    NexusSync(model)
    x = torch.ones(4, 16)
    with pytest.raises(ValueError, match="planted"):
        model[2](Fails.apply(model[0](x))).sum().backward()
    model.zero_grad()
    reference = net()
    for m in (model, reference):
        backward(m, x)
    for p, q in zip(model.parameters(), reference.parameters()):
        assert torch.equal(p.grad, q.grad)


def test_edits_survive_replanning_and_partial_loading():
    model = net(torch.bfloat16)
    held = ParameterMap(model)
    optimizer = AdamW(held, lr=0.0, weight_decay=0.0)
    with torch.no_grad():
        model[0].weight.fill_(7)
    held.set_pool_size(held.blocks[0].info["pool"], 1 << 20)
    with torch.no_grad():
        model[2].weight.fill_(5)
    model.load_state_dict({"0.bias": torch.zeros(16)}, strict=False)
    backward(model)
    optimizer.step()
    assert (model[0].weight == 7).all() and (model[2].weight == 5).all()


def test_two_optimizers_share_a_map():
    model = net(torch.bfloat16)
    held = ParameterMap(model)
    first, second = (AdamW(list(model[i].parameters()), lr=1e-1, map=held) for i in (0, 2))
    before = [p.detach().clone() for p in model.parameters()]
    backward(model)
    first.step()
    second.step()
    assert all((p != b).any() for p, b in zip(model.parameters(), before))
    backward(model)
    first.zero_grad()
    assert {b.name for b in held.gradients_present()} == {"2.weight", "2.bias"}


def test_the_model_keeps_its_map_and_copies_are_ordinary():
    model = Gr00tN16(preset("tiny"))
    accelerate(model)
    gc.collect()
    held = map_of(model)
    assert held is not None
    sync = NexusSync(model, reduce="sum")
    model.reduce_stats = sync.reduce_stats
    other = copy.deepcopy(model)
    assert map_of(other) is None and other.reduce_stats(torch.ones(2)).equal(torch.ones(2))
    sync.close()


def test_added_parameters_are_told_and_trained_after_replanning():
    model = net()
    held = ParameterMap(model)
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    optimizer = AdamW(held, lr=1e-2)
    model.append(nn.Linear(16, 16))
    backward(model)
    with pytest.raises(RuntimeError, match="3.weight was added after planning"):
        optimizer.step()
    model.zero_grad()
    held.replan()
    optimizer.add_param_group({"params": list(model[3].parameters())})
    before = model[3].weight.detach().clone()
    backward(model)
    optimizer.step()
    assert (model[3].weight != before).any()
    assert len(seen) == 2  # the user's own hook is still there


def test_undo_gives_back_the_original_precision():
    model = net()
    held = accelerate(model, dtype=torch.bfloat16)
    held.release()
    for p, q in zip(model.parameters(), net().parameters()):
        assert torch.equal(p, q)


def test_vault_follows_a_replanned_map_and_lets_go(tmp_path):
    model = net()
    held = ParameterMap(model)
    optimizer = AdamW(held, lr=1e-2)
    vault = CheckpointVault(tmp_path / "v", model=model)
    held.set_pool_size(held.blocks[0].info["pool"], 1 << 20)
    backward(model)
    optimizer.step()
    vault.save(1, {"note": [1, 2]})
    with pytest.raises(RuntimeError, match="has checkpoints of the map as it is"):
        held.set_pool_size(held.blocks[0].info["pool"], 2 << 20)
    held.check()
    assert vault.steps() == [1]
    vault.close()
    held.set_pool_size(held.blocks[0].info["pool"], 2 << 20)
    with CheckpointVault(tmp_path / "w", model=model) as again:
        again.save(1)
        again.wait()
        moments = optimizer.state[model[0].weight]["exp_avg"].clone()
        optimizer.state[model[0].weight]["exp_avg"].zero_()
        assert again.restore()["step"] == 1
        assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments)


def test_a_base_outside_the_vault_is_written_then_taken(tmp_path):
    model = net()
    held = ParameterMap(model)
    AdamW(held)
    base = tmp_path / "models" / "base.bin"
    with CheckpointVault(tmp_path / "a", base, model=model) as vault:
        vault.save(5)
    assert base.exists()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    other = net()
    with torch.no_grad():
        other[0].weight.fill_(3)
    AdamW(ParameterMap(other))
    with CheckpointVault(tmp_path / "b", base, model=other) as vault:
        pass
    for n, p in other.named_parameters():
        assert torch.equal(p, weights[n])
    merged = tmp_path / "final.bin"
    with CheckpointVault(tmp_path / "a", model=model) as vault:
        vault.merge_final_checkpoint(merged)
    assert merged.stat().st_size > 1000


def test_weights_alone_are_saved_with_a_warning_beside_a_stock_optimizer(tmp_path):
    model = net()
    with pytest.warns(UserWarning, match="hold weights, no optimizer state"):
        vault = CheckpointVault(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1))
    vault.save(1)
    vault.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = net()
        with CheckpointVault(tmp_path, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=1)) as vault:
            assert vault.restore()["step"] == 1
    with pytest.raises(loongforge.Error, match="did you mean 'keep_last'"):
        CheckpointVault(tmp_path / "x", model=other, keep_lst=3)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_another_library_than_the_one_built_with_is_refused(tmp_path):
    other = tmp_path / "other.so"
    source = 'int lf_abi_version(void) { return 99; } const char *lf_version_string(void) { return "9.9"; }'
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", other], input=source, text=True, check=True)
    command = [sys.executable, "-c", "from loongforge import _C"]
    done = subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(other)}, capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: libloongforge.so is 9.9 (ABI 99), expected the " in done.stderr, done.stderr
