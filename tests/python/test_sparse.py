# SPDX-License-Identifier: Apache-2.0
"""The sparse form over real processes: replicas, resuming, and `loongforge train`."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch

from loongforge import _C, topk_allreduce

MULTI = pathlib.Path(__file__).parent / "multi"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_stay_alike_lose_nothing_and_resume(world, tmp_path):
    command = [*TORCHRUN, f"--nproc-per-node={world}", str(MULTI / "sparse.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all well") == world


def test_a_sparse_run_is_resumed_bit_for_bit(tmp_path):
    scenes = tmp_path / "scenes"
    _C.pack_scenes(str(scenes), {"scenes": 120})

    def train(world, name, steps, *more):
        options = ["--data", scenes, "--name", name, "--steps", steps, "--batch_size", "4", "--threads", "1", "--eval", "false"]
        options += ["--vault.diff_interval", "2", "--nexus.comm_strategy", "sparse", "--map.high_load_experts", "2", *more]
        args = [*TORCHRUN, f"--nproc-per-node={world}", "-m", "loongforge.train", *map(str, options)]
        done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = (tmp_path / "runs" / name / "log.jsonl").read_text().splitlines()
        return done.stdout + done.stderr, [(r["step"], r["loss"], r["grad_norm"]) for r in map(json.loads, rows)]

    _, whole = train(2, "whole", 8)
    train(2, "cut", 5)
    files = sorted(p.name for p in (tmp_path / "runs" / "cut" / "residuals").iterdir())
    assert files == [f"step{s:08d}.rank{r}" for s in (2, 4, 5) for r in (0, 1)]
    out, cut = train(2, "cut", 8, "--resume")
    assert cut == whole and "dropped" not in out
    assert json.loads((tmp_path / "runs" / "cut" / "summary.json").read_text())["nexus"]["bytes"] > 0
    out, _ = train(1, "cut", 9, "--resume")  # one rank reduces nothing
    assert "2 ranks had kept back of their gradients is dropped" in out


def test_topk_takes_other_dtypes_and_refuses_what_it_cannot():
    grad = torch.randn(257).bfloat16()
    residual = torch.zeros(257)
    out = topk_allreduce(grad, 0.15, residual=residual)
    assert out.dtype == torch.bfloat16 and (out != 0).sum() == 39
    assert torch.equal(out.float() + residual, grad.float())
    with pytest.raises(TypeError, match="float64, expected"):
        topk_allreduce(grad.double())
    with pytest.raises(ValueError, match="not float32"):
        topk_allreduce(grad, residual=grad.clone())
    for n in (0, 1):
        assert topk_allreduce(torch.ones(n)).equal(torch.ones(n))
    spoiled = torch.ones(1000)
    spoiled[777] = float("nan")
    assert topk_allreduce(spoiled, 0.001).isnan().nonzero().tolist() == [[777]]
