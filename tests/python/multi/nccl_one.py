# SPDX-License-Identifier: Apache-2.0
"""Run by test_nccl.py where there is a GPU: the real NCCL with one rank. nccl_one.py basic|graph|late|replay|exit

basic   options, registration, sums, a capture and its replays, a capture that breaks
graph   StepGraph with NexusSync's hooks, which are made to believe in two ranks, against the same steps without
late    the device is busy for longer than the deadline: an error in time, an abort, and the GPU goes on
replay  the same inside a replay
exit    a host that sits in the driver meanwhile: the process ends by itself with code 75
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from loongforge import _C, AdamW, Error, NexusSync
from loongforge.graph import StepGraph
from loongforge.mapping import ParameterMap
from loongforge.streams import DTYPES, stream_of

device = torch.device("cuda", 0)
torch.cuda.set_device(device)


def opened(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).to(device)
    held = ParameterMap(model, optimizer_state=False)
    given = dict(chunk_bytes=1 << 20, run_bytes=4 << 20, timeout_s=20.0, fail="error", reduce="sum")
    return held, _C.nexus_open(held.handle, ("nccl", 0, 1, _C.nccl_id({})), given | options)


def step(held, handle):
    _C.nexus_begin(handle)
    for b in reversed(held.blocks):
        _C.nexus_mark(handle, b.index, stream_of(device))
    _C.nexus_finish(handle, stream_of(device))


def busy(seconds):
    torch.cuda._sleep(int(2e9 * seconds))


def failure(handle, within):
    """The error that a call gets once the watchers have found something."""
    began = time.monotonic()
    while time.monotonic() - began < within:
        try:
            _C.nexus_check(handle)
        except Error as error:
            return error.args[2], time.monotonic() - began
        time.sleep(0.01)
    raise AssertionError(f"no error within {within} s")


def basic():
    for options in ({}, {"nccl_blocking": False}, {"register_buffers": False, "priority": -1, "max_ctas": 8}):
        held, handle = opened(**options)
        text = _C.nexus_describe(handle)
        assert "loaded already" in text, text  # torch's
        for b in held.blocks:
            b.grad.fill_(b.index + 1.0)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step(held, handle)
        _C.nexus_settle(handle)
        assert all(torch.equal(b.grad, torch.full_like(b.grad, b.index + 1.0)) for b in held.blocks)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            step(held, handle)
        host = (time.perf_counter() - began) / 20 / len({c["run"] for c in _C.nexus_chunks(handle)})
        small = torch.tensor([1.5, 2.5], dtype=torch.float64, device=device)
        _C.nexus_reduce(handle, small.data_ptr(), 2, DTYPES[small.dtype], stream_of(device))
        assert small.tolist() == [1.5, 2.5]
        captures(held, handle)
        stats = _C.nexus_stats(handle)
        assert stats["steps"] == 30 and stats["collectives"] == 30 * len(_C.nexus_chunks(handle)) and stats["busy_s"] > 0, stats
        print(f"{text}; host {1e6 * host:.0f} us a run")
        handle.close()


def captures(held, handle):
    _C.nexus_settle(handle)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for b in held.blocks:
            b.grad.mul_(2.0)
        step(held, handle)
    time.sleep(0.2)  # the watchers look a few times
    _C.nexus_check(handle)
    for _ in range(5):
        graph.replay()
        _C.nexus_replayed(handle, stream_of(device))
    _C.nexus_settle(handle)
    assert held.blocks[0].grad[0, 0].item() == 32.0 * (held.blocks[0].index + 1)
    broken = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(broken, stream=stream, capture_error_mode="thread_local"):
            _C.nexus_begin(handle)
            for b in list(reversed(held.blocks))[:4]:
                _C.nexus_mark(handle, b.index, stream_of(device))
            held.blocks[0].grad.sum().item()
        raise AssertionError("reading a value did not break the capture")
    except RuntimeError:
        torch.cuda.synchronize()
    _C.nexus_cancel(handle)
    for _ in range(2):
        step(held, handle)
    _C.nexus_settle(handle)


def graph():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)

    def make(pretend):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).to(device)
        held = ParameterMap(model)
        optimizer = AdamW(held, lr=1e-2)
        sync = NexusSync(model, reduce="sum", fail="error", timeout_s=20.0)
        if pretend:
            sync.world, sync.transport = 2, "nccl"
            sync._reopen()
            sync.broadcast_state()
            held.passes.on_gradient(sync._ready)
            held.passes.on_end(sync._finish)
            held.passes.on_abort(sync._abort)
            sync.agree = lambda good: good

        def forward_backward(x, y):
            loss = (model(x) - y).square().mean()
            loss.backward()
            return sync.sum(loss.detach().double().view(1)).clone()

        return sync, StepGraph(forward_backward, optimizer, sync=sync, clip=0.5, warmup=2), held

    plain, reduced = make(False), make(True)
    g = torch.Generator().manual_seed(1)
    for i in range(12):
        x, y = torch.randn(32, 256, generator=g).to(device), torch.randn(32, 64, generator=g).to(device)
        losses = [one[1](x, y).item() for one in (plain, reduced)]
        assert losses[0] == losses[1], (i, losses)
    assert all(torch.equal(p.param, q.param) for p, q in zip(plain[2].blocks, reduced[2].blocks))
    assert reduced[1].reason is None and reduced[1].n_captured == 1 and reduced[0].stats()["steps"] == 12, reduced[1].reason
    reduced[0].close()
    plain[0].close()


def late():
    held, handle = opened(timeout_s=2.0)
    step(held, handle)
    _C.nexus_settle(handle)
    busy(6)
    step(held, handle)
    text, took = failure(handle, 10)
    assert "is not done after" in text and took < 4, (text, took)
    torch.cuda.synchronize()
    assert torch.ones(3, device=device).sum().item() == 3
    print(f"after {took:.2f} s: {text}")
    handle.close()


def replay():
    held, handle = opened(timeout_s=1.0)
    step(held, handle)
    _C.nexus_settle(handle)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        busy(4)
        step(held, handle)
    graph.replay()
    _C.nexus_replayed(handle, stream_of(device))
    text, took = failure(handle, 10)
    assert "a captured step is not done after" in text and took < 3, (text, took)
    handle.close()


def exits():
    held, handle = opened(timeout_s=1.0, grace_s=1.0, fail="exit")
    step(held, handle)
    _C.nexus_settle(handle)
    busy(20)
    step(held, handle)
    torch.cuda.synchronize()
    print("not reached", flush=True)


{"basic": basic, "graph": graph, "late": late, "replay": replay, "exit": exits}[sys.argv[1]]()
print(sys.argv[1], "passed", flush=True)
os._exit(0)
