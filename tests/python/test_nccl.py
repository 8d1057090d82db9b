# SPDX-License-Identifier: Apache-2.0
"""Choosing NCCL: what ranks tell each other, and what comes of it. The transport itself: tests/unit/t_nexus_nccl.c, and on GPUs
tests/python/multi/nccl_ranks.py."""

import copy
import gc
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import loongforge
from loongforge import _C, NexusSync
from loongforge.nccl import judge, why_not


def rank(gpu=0, version="2.28.9", why=None, host="a"):
    return {"gpu": (host, None, gpu), "version": version, "why": why}


def test_judgement():
    assert judge([rank(0), rank(1)]) is None
    assert judge([rank(0), rank(0, host="b")]) is None
    assert judge([rank(0), rank(1), rank(0)]) == "ranks 0 and 2 share a GPU, and NCCL wants one each"
    assert judge([rank(0), rank(1, version="2.27.3")]) == "the ranks have different versions of NCCL: 2.27.3, 2.28.9"
    assert judge([rank(0), rank(1, why="no NCCL: not there")]) == "rank 1: no NCCL: not there"


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_cpu_cannot(alone):
    assert why_not(torch.device("cpu"), None, {}) == "rank 0: the model is on cpu"


def test_transports_by_name():
    with pytest.raises(ValueError, match="transport is 'pigeon', expected 'nccl', 'torch' or 'mpi'"):
        NexusSync(nn.Linear(2, 2), transport="pigeon")
    gc.collect()
    model = nn.Linear(2, 2)
    sync = NexusSync(model)
    assert sync.describe() == "transport loopback, rank 0 of 1"
    assert sync.transport == "loopback" and sync.note is None and sync.capturable
    sync.check()
    sync.settle()
    sync.replayed()
    sync.cancel()
    assert sync.agree(True) and not sync.agree(False)
    stats = torch.ones(3)
    assert sync.reduce_stats(stats) is stats
    assert copy.deepcopy(sync.reduce_stats)(stats) is stats
    sync.close()


def test_a_missing_library_is_an_error_with_its_name():
    with pytest.raises(loongforge.Error, match="no NCCL: /nowhere/libnccl.so"):
        _C.nccl_version({"nccl_library": "/nowhere/libnccl.so"})
    with pytest.raises(loongforge.Error, match="no NCCL: /nowhere/libnccl.so"):
        _C.nccl_id({"nccl_library": "/nowhere/libnccl.so"})


def test_nccl_wants_a_gpu():
    held = loongforge.ParameterMap(nn.Linear(2, 2))
    with pytest.raises(loongforge.Error, match="NCCL works on GPUs, the device is cpu"):
        _C.nexus_open(held.handle, ("nccl", 0, 1, bytes(128)), {})
    with pytest.raises(ValueError, match="transport is 'nccl' with 3 bytes"):
        _C.nexus_open(held.handle, ("nccl", 0, 1, b"abc"), {})


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")
MULTI = pathlib.Path(__file__).parent / "multi"


@needs_gpu
@pytest.mark.parametrize("what", ["basic", "graph", "late", "replay"])
def test_one_rank_on_a_gpu(what):
    done = subprocess.run([sys.executable, str(MULTI / "nccl_one.py"), what], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and f"{what} passed" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]


@needs_gpu
def test_a_host_in_the_driver_is_ended():
    done = subprocess.run([sys.executable, str(MULTI / "nccl_one.py"), "exit"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 75 and "exit with code 75" in done.stderr, done.stdout[-2000:] + done.stderr[-3000:]
    assert "not reached" not in done.stdout


@needs_two_gpus
@pytest.mark.parametrize("what", ["sums", "twice", "capture", "torch", "sparse"])
def test_ranks_on_gpus(what):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(MULTI / "nccl_ranks.py"), what], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"{what} passed" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]


@needs_two_gpus
def test_captured_steps_follow_the_chunk_size():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(MULTI / "retune.py"), "cuda"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("all the same bits") == 2, done.stdout[-2000:] + done.stderr[-3000:]


@needs_two_gpus
def test_killed_ranks_on_gpus():
    done = subprocess.run([sys.executable, str(MULTI / "nccl_kill.py")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
