# SPDX-License-Identifier: Apache-2.0
"""Ranks that mpirun started: NexusSync and `loongforge train` without torch.distributed."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from loongforge import _C

MULTI = pathlib.Path(__file__).parent / "multi"


def mpirun(world, *command, cwd=None, timeout=200):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: Open MPI (openmpi-bin) is not installed")
    if "Open MPI" not in subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout:
        pytest.skip("mpirun is not Open MPI's, whose variables these tests read")
    args = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(world), *map(str, command)]
    return subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    path = tmp_path_factory.mktemp("set") / "scenes"
    _C.pack_scenes(str(path), {"scenes": 200})
    return path


def test_sync_over_mpi():
    done = mpirun(3, sys.executable, MULTI / "mpi_ranks.py")
    assert done.returncode == 0 and done.stdout.count("rank passed") == 3, done.stdout + done.stderr


def rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_train_is_the_same_as_under_torchrun_and_resumes(scenes, tmp_path):
    options = ["--data", scenes, "--val_data", scenes, "--batch_size", "4", "--threads", "1", "--lr", "1e-3"]
    options += ["--vault.diff_interval", "2", "--eval_every", "0"]
    for steps, more in (("3", ()), ("5", ("--resume",))):
        done = mpirun(
            2, sys.executable, "-m", "loongforge.train", *options, "--name", "mpi", "--steps", steps, *more, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "Open MPI v" in done.stderr and "rank 0 of 2" in done.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "loongforge.train"]
    args = [*torchrun, *map(str, options), "--name", "torch", "--steps", "5", "--eval", "false"]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = rows(tmp_path / "runs" / "mpi"), rows(tmp_path / "runs" / "torch")
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in ours] == [(r["step"], r["loss"], r["grad_norm"]) for r in theirs]
    summary = json.loads((tmp_path / "runs" / "mpi" / "summary.json").read_text())
    assert summary["world"] == 2 and summary["resumed_from"] == 3 and summary["val_loss"] is not None


def test_a_rank_that_fails_ends_the_run(scenes, tmp_path):
    wrong = MULTI.parent / "nowhere"
    done = mpirun(2, sys.executable, "-m", "loongforge.train", "--data", wrong, "--name", "x", cwd=tmp_path, timeout=100)
    assert done.returncode != 0 and "Traceback" not in done.stderr


def test_a_launcher_of_another_mpi_is_told(scenes, tmp_path):
    """The library starts alone, and says so instead of training as rank 0 of 1 beside three others of the same kind."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: Open MPI (openmpi-bin) is not installed")
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))},
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "0",
    }
    args = [sys.executable, "-m", "loongforge.train", "--data", str(scenes), "--name", "x", "--steps", "1"]
    done = subprocess.run(args, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "has 1 rank(s), the launcher started 4" in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "runs").exists()
