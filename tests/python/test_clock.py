# SPDX-License-Identifier: Apache-2.0
"""The step clock through the extension: on the CPU figures come at once; on a GPU late, also from a captured step."""

import time

import pytest
import torch

from loongforge import _C
from loongforge.streams import device_of, stream_of


def test_the_cpu_is_host_time():
    clock = _C.clock_open()
    _C.clock_follow(clock, _C.device_open("cpu"), 0)
    for i in range(3):
        _C.clock_step_begin(clock)
        _C.clock_part_begin(clock, "data")
        time.sleep(0.002)
        _C.clock_part_end(clock, "data")
        _C.clock_mark_begin(clock, "compute", 0)
        _C.clock_mark_end(clock, "compute", 0)
        _C.clock_mark_begin(clock, "optimizer", 0)
        time.sleep(0.001)
        _C.clock_mark_end(clock, "optimizer", 0)
        last = _C.clock_step_end(clock, 10)
        assert last["step"] == i and last["steps"] == 1 and last["tokens"] == 10 and last["lost"] == 0 and last["gap_s"] == 0
        assert last["exposed_s"]["data"] >= 0.002 and last["exposed_s"]["optimizer"] >= 0.001
        assert sum(last["exposed_s"].values()) == pytest.approx(last["wall_s"], abs=1e-9)
    _C.clock_pause(clock)
    total = _C.clock_summary(clock)
    assert total["steps"] == 3 and total["step"] == 2 and total["tokens"] == 30
    with pytest.raises(_C.Error, match="has begun steps"):
        _C.clock_follow(clock, None, 0)


def test_arguments():
    clock = _C.clock_open()
    with pytest.raises(_C.Error, match="depth is 1"):
        _C.clock_follow(clock, None, 0, 1)
    with pytest.raises(TypeError):
        _C.clock_follow(clock, clock, 0)
    with pytest.raises(ValueError, match="optimiser"):
        _C.clock_mark_begin(clock, "optimiser", 0)
    with pytest.raises(_C.Error, match="outside a step"):
        _C.clock_mark_begin(clock, "optimizer", 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_captured_step():
    device = torch.device("cuda")
    x = torch.zeros(1 << 20, device=device)
    clock = _C.clock_open()
    _C.clock_follow(clock, device_of(x), stream_of(device), 32)

    def step():
        _C.clock_mark_begin(clock, "compute", stream_of(device))
        for _ in range(20):
            x.add_(1)
        _C.clock_mark_begin(clock, "optimizer", stream_of(device))
        torch.cuda._sleep(4_000_000)
        _C.clock_mark_end(clock, "optimizer", stream_of(device))
        _C.clock_mark_end(clock, "compute", stream_of(device))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # counts for no step
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    told = []
    for i in range(20):
        _C.clock_step_begin(clock)
        (graph.replay if i >= 5 else step)()
        told.append(_C.clock_step_end(clock, 7))
    assert told[0] is None and sum(t is not None for t in told) < 10  # nothing waited
    total = _C.clock_summary(clock)
    assert total["steps"] == 20 and total["lost"] == 0 and total["tokens"] == 140
    assert float(x[0]) == 20 * 21
    assert sum(total["exposed_s"].values()) == pytest.approx(total["wall_s"], rel=1e-9)
    assert total["busy_s"]["optimizer"] > 20 * 1e-3 > total["busy_s"]["compute"] > 0
    print({k: v for k, v in total.items() if k.endswith("_s")})
