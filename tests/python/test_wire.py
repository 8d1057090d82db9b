# SPDX-License-Identifier: Apache-2.0
"""f32 gradients that travel as bf16, over real processes."""

import json
import pathlib
import subprocess
import sys

import pytest

import loongforge
from loongforge import _C

MULTI = pathlib.Path(__file__).parent / "multi"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_stay_alike_and_go_where_f32_goes(world):
    command = [*TORCHRUN, f"--nproc-per-node={world}", str(MULTI / "wire.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all well") == world


@pytest.mark.long
def test_a_run_trains_with_half_the_bytes(tmp_path):
    scenes = tmp_path / "scenes"
    _C.pack_scenes(str(scenes), {"scenes": 60})

    def train(name, wire):
        options = ["--data", scenes, "--name", name, "--steps", 3, "--batch_size", "4", "--threads", "1", "--eval", "false"]
        args = [*TORCHRUN, "--nproc-per-node=2", "-m", "loongforge.train", *map(str, options), "--nexus.wire_dtype", wire]
        done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        run = tmp_path / "runs" / name
        rows = [json.loads(row) for row in (run / "log.jsonl").read_text().splitlines()]
        return [r["loss"] for r in rows], json.loads((run / "summary.json").read_text())["nexus"]["bytes"]

    (dense, all_bytes), (bf16, half) = train("dense", "grad"), train("bf16", "bf16")
    assert half < 0.6 * all_bytes
    assert bf16 == pytest.approx(dense, rel=1e-2) and bf16 != dense


def test_another_word_is_refused():
    with pytest.raises(loongforge.Error, match="wire_dtype is 'fp8', expected one of"):
        _C.options_check("nexus", {"wire_dtype": "fp8"})
    assert _C.options_check("nexus", {})["wire_dtype"] == "grad"
