# SPDX-License-Identifier: Apache-2.0
"""NexusSync: two real processes against one, and the two collectives by themselves."""

import gc
import json
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import loongforge
from loongforge import _C, NexusSync, nccl_allreduce, topk_allreduce
from loongforge.mapping import ParameterMap

MULTI = pathlib.Path(__file__).parent / "multi"


def more(world):
    """More ranks than CI has cores."""
    return pytest.param(world, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    path = tmp_path_factory.mktemp("set") / "scenes"
    _C.pack_scenes(str(path), {"scenes": 400})
    return path


def launch(world, *args, program="two_ranks.py"):
    command = [sys.executable, str(MULTI / program), *map(str, args)]
    if world > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def distance(a, b):
    return max(((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-12)).item() for n in a)


def test_two_ranks_equal_one_with_twice_the_batch(scenes, tmp_path):
    launch(1, scenes, tmp_path / "one.pt", 1)
    launch(2, scenes, tmp_path / "two.pt", 1)
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("one", "two"))
    assert distance(one["gradients"], two["gradients"]) < 1e-5
    # Rounding of the first steps grows through AdamW's normalisation: 20 losses agree to 1e-3.
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert two["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert one["losses"][-1] < one["losses"][0]
    assert two["stats"]["collectives"] == 20 * two["chunks"] > 20
    launch(2, scenes, tmp_path / "again.pt", 1)
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["losses"] == two["losses"]  # bit for bit


def test_gradients_are_those_of_ddp():
    assert "gradients agree" in launch(2, program="ddp_ranks.py")


@pytest.mark.long
def test_micro_steps_reduce_once(scenes, tmp_path):
    launch(2, scenes, tmp_path / "micro.pt", 2)
    micro = torch.load(tmp_path / "micro.pt", weights_only=True)
    assert micro["stats"]["collectives"] == 20 * micro["chunks"]
    assert micro["losses"][-1] < micro["losses"][0]


@pytest.mark.parametrize("world", [2, more(3)])
def test_reducing_in_every_micro_step_gives_the_same_gradients(world):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(MULTI / "micro.py")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("micro steps agree") == world


@pytest.mark.long
def test_a_run_that_reduces_in_every_micro_step(scenes, tmp_path):
    rows, sent = {}, {}
    for name, every in (("last", "false"), ("every", "true")):
        options = ["--data", scenes, "--name", name, "--steps", "3", "--batch_size", "8", "--micro_steps", "2", "--threads", "1"]
        options += ["--eval", "false", "--dtype", "f32", "--nexus.every_micro_step", every]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "loongforge.train"]
        done = subprocess.run([*command, *map(str, options)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("reductions in each of 2 micro steps: " in done.stderr) == (every == "true")
        run = tmp_path / "runs" / name
        rows[name] = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        sent[name] = json.loads((run / "summary.json").read_text())["nexus"]["bytes"]
    assert sent["every"] == 2 * sent["last"]
    for a, b in zip(rows["last"], rows["every"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5) and b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


def test_replicas_start_equal_and_double_reductions_are_refused():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(MULTI / "refusals.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all refused") == 2


@pytest.mark.parametrize("world", [2, more(3)])
def test_updates_that_begin_early_are_the_ordinary_ones(world):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(MULTI / "overlap.py")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all equal") == world


@pytest.mark.parametrize("world", [2, more(4)])
def test_an_optimizer_in_shares_is_the_whole_one(world, tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(MULTI / "shard.py"), str(tmp_path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all alike") == world


@pytest.mark.parametrize("world", [2, more(3)])
def test_a_chunk_size_that_changes_changes_nothing_else(world):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(MULTI / "retune.py")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all the same bits") == world


def test_experts_without_a_token_anywhere_do_not_move():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(MULTI / "empty.py")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all the same") == 2


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def test_holders_of_captured_steps_are_told_before_the_handle_goes():
    model = small()
    sync, told = NexusSync(model), []
    sync.on_void(lambda: told.append((sync.handle, _C.nexus_stats(sync.handle)["steps"])))  # a closed one would raise
    before = sync.handle
    sync.map.replan()
    assert [handle is before for handle, _ in told] == [True] and sync.handle is not before
    sync.close()
    assert len(told) == 2
    raising = NexusSync(model)
    raising.on_void(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        raising.close()
    NexusSync(model).close()  # closed all the same


def test_alone_on_an_ordinary_model_with_a_stock_optimizer():
    stock, ours = small(), small()
    sync = NexusSync(ours)
    x = torch.randn(5, 8)
    for model in (stock, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(stock.parameters(), ours.parameters()):
        assert torch.equal(p, q)
    assert sync.stats()["collectives"] == 0  # one rank: nothing moves
    with pytest.raises(RuntimeError, match="NexusSync already"):
        NexusSync(ours)
    sync.close()


def test_bad_options_are_named():
    with pytest.raises(loongforge.Error, match="comm_strategy is 'quick', expected one of"):
        NexusSync(small(), comm_strategy="quick")
    with pytest.raises(loongforge.Error, match="k_ratio is 2, expected"):
        NexusSync(small(), comm_strategy="sparse", k_ratio=2)
    with pytest.raises(loongforge.Error, match="did you mean 'chunk_bytes'"):
        NexusSync(small(), chunk_byte=3)


def test_error_hiding_settings_are_told(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    sync = NexusSync(small())
    assert "unreduced without an error" in sync.ignored_environment[0]
    sync.close()


def test_topk_loses_nothing():
    torch.manual_seed(0)
    residual, sent_total, grad_total = torch.zeros(40, 25), torch.zeros(40, 25), torch.zeros(40, 25)
    for _ in range(5):
        grad = torch.randn(40, 25)
        out = topk_allreduce(grad, 0.15, residual=residual)
        assert (out != 0).sum() <= 150
        sent_total, grad_total = sent_total + out, grad_total + grad
    torch.testing.assert_close(sent_total + residual, grad_total)
    with pytest.raises(ValueError, match="k_ratio is 0"):
        topk_allreduce(grad, 0)
    held = torch.randn(10)
    topk_allreduce(held, 0.5)
    torch.testing.assert_close(topk_allreduce(held, 1.0), 2 * held - topk_allreduce_first(held), rtol=0, atol=1e-6)


def topk_allreduce_first(grad):
    """What the first call sent: the larger half."""
    index = grad.abs().topk(5).indices
    return torch.zeros_like(grad).index_copy_(0, index, grad[index])


def test_chunked_allreduce_is_a_sum(tmp_path):
    grad = torch.randn(1000)
    assert nccl_allreduce(grad.clone()).equal(grad)  # one process, no group
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert nccl_allreduce(grad.clone(), chunk_size=64).equal(grad)
        with pytest.raises(ValueError, match="chunk_size is 0"):
            nccl_allreduce(grad, 0)
        with pytest.raises(ValueError, match="not contiguous"):
            nccl_allreduce(torch.randn(4, 4).t())
    finally:
        dist.destroy_process_group()


def test_the_hook_of_the_listing_needs_a_listener():
    gc.collect()
    model = small()
    held = ParameterMap(model)
    with pytest.raises(RuntimeError, match="no NexusSync exists"):
        NexusSync.backward_hook(model, None, None)
    del held
