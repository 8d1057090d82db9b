# SPDX-License-Identifier: Apache-2.0
"""What is watched beside the steps. Sampling itself: tests/unit/t_scope_monitor.c."""

import time

import pytest
import torch

import loongforge
from loongforge import _C
from loongforge.train.monitor import GpuMonitor, Skew, comm_text


def test_a_missing_library_is_an_error_with_its_name():
    with pytest.raises(loongforge.Error, match="no NVML: /nowhere"):
        _C.monitor_open("0", 50, "/nowhere/libnvidia-ml.so.1")
    with pytest.raises(loongforge.Error, match="interval_ms is -1"):
        _C.monitor_open("0", -1)


def test_the_cpu_is_not_watched():
    monitor = GpuMonitor(torch.device("cpu"))
    assert monitor.summary() is None and monitor.note is None
    monitor.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_tells():
    monitor = GpuMonitor(torch.device("cuda", 0))
    assert monitor.note is None
    deadline = time.monotonic() + 20
    while monitor.summary()["samples"] < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    newest, summary = _C.monitor_latest(monitor.handle), monitor.summary()
    assert newest["memory_used_bytes"] > 0 and 0 <= newest["sm_pct"] <= 100 and newest["sm_mhz"] > 0
    assert summary["most"]["sm_pct"] >= summary["mean"]["sm_pct"]
    monitor.close()


def test_nothing_is_held_back_without_a_monitor():
    sync = loongforge.NexusSync(torch.nn.Linear(2, 2), launch_busy_pct=90)
    with pytest.raises(TypeError):
        sync.gate(3)
    sync.gate(None)
    assert sync.stats()["held_s"] == 0
    sync.close()


def test_skew_is_how_much_longer_a_rank_waits():
    skew = Skew(3)
    assert skew.summary() is None and skew.mean() is None
    skew.add(0.25)
    skew.add(0.75)
    assert skew.mean() == 0.5 and skew.mean() is None  # of the steps since
    assert skew.take([0.5, 0.25, None]) is None  # a rank has no times yet
    assert skew.take([0.5, 0.25, 1.25]) == [0.25, 0.0, 1.0]
    assert skew.take([0.25, 0.5, 0.25]) == [0.0, 0.25, 0.0]
    assert skew.summary() == {"ahead_s": [0.125, 0.125, 0.5], "most_s": 1.0, "last_rank": 0, "last_share": 0.5}


def test_the_line_at_the_end():
    stats = {"collectives": 7, "p50_s": 1e-3, "p95_s": 2e-3, "p99_s": 3e-3, "bus_bytes_s": 1.5e9, "exposed_share": 0.25}
    skew = {"ahead_s": [0.0, 0.004], "most_s": 0.01, "last_rank": 0, "last_share": 1.0}
    line = comm_text(stats, skew)
    assert "p50/p95/p99 1.00/2.00/3.00 ms, bus bandwidth 1.50 GB/s, 25 % of their time exposed" in line
    assert "by 4.0 ms a step at most on average, rank 0 last in 100 %" in line
    assert "ranks ahead" not in comm_text(stats, None)
