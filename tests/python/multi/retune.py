# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py (gloo) and test_nccl.py (argv: cuda) under torchrun: a chunk size that changes between steps changes
nothing else; captured steps are captured anew."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from loongforge import AdamW, NexusSync
from loongforge.graph import StepGraph
from loongforge.mapping import EXP_AVG, EXP_AVG_SQ, ParameterMap

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
device = torch.device("cuda", rank) if sys.argv[1:] == ["cuda"] else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
BOUNDS = {"chunk_tune": True, "chunk_least": 4096, "chunk_most": 65536}
MOST = 60 if device.type == "cpu" else 90  # each new size warms up and is captured first


class Run:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(5))).to(device)
        self.map = ParameterMap(self.model)
        self.optimizer = AdamW(self.map, lr=1e-2)
        self.sync = NexusSync(self.model, chunk_bytes=4096, run_bytes=16384, reduce="mean", **options)
        self.data = torch.Generator().manual_seed(1 + rank)
        self.graph = StepGraph(self.forward_backward, self.optimizer, sync=self.sync, overlap_update=True)

    def batch(self):
        return torch.randn(6, 50, generator=self.data).to(device)

    def step(self):
        return self.graph(self.batch())

    def plain_step(self):
        self.forward_backward(self.batch())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward_backward(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss.detach()

    def planes(self):
        self.sync.gather_state()
        return [
            t.detach().clone()
            for b in self.map.blocks
            for t in (b.weight, *(self.map.tensor(b, r) for r in (EXP_AVG, EXP_AVG_SQ)))
        ]


def alike(a, b):
    """Sums of two ranks have one order; of more, gloo's depends on how they are cut."""
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0 if world == 2 else 1e-4, atol=0 if world == 2 else 1e-5)


def same_everywhere(value):
    every = [None] * world
    dist.all_gather_object(every, value)
    return every == [value] * world


# By hand, in a loop of one's own.
plain = Run()
for _ in range(9):
    plain.step()
for shard in (False, True):
    run = Run(shard_optimizer=shard)
    chunks = []
    for size in (16384, 1 << 40, 4096):
        for _ in range(3):
            run.plain_step()
        run.sync.retune(size)
        chunks.append(len(run.sync.chunks()))
        assert run.sync.stats()["chunk_bytes"] == size and len(run.sync.runs) == run.sync.chunks()[-1]["run"] + 1
    assert chunks[1] < chunks[0] < chunks[2], chunks
    assert not run.sync.chunk_size()["why"].startswith("one rank") and not run.sync.tuning
    alike(run.planes(), plain.planes())
    run.map.replan()  # the size stays
    assert len(run.sync.chunks()) == chunks[2]
    run.sync.close()
plain.sync.close()

# By StepGraph, to its end: told on every change, the same size everywhere, and nothing more to tell then.
plain = Run()
for _ in range(MOST):
    plain.step()
for shard in (False, True):
    run, told = Run(shard_optimizer=shard, **BOUNDS), []
    run.sync.on_void(lambda told=told, sync=run.sync: told.append(sync.stats()["chunk_bytes"]))
    assert run.sync.tuning
    settled = None
    for i in range(MOST):
        run.step()
        settled = i if settled is None and not run.sync.tuning else settled
    found = run.sync.chunk_size()
    assert settled is not None and settled < MOST - 1 and found["n_tried"] == found["n_sizes"] == 3, found
    assert told[:2] == [16384, 65536] and told[2:] in ([4096], [4096, 16384], [4096, 65536]), told
    assert found["chunk_bytes"] == told[-1] and found["first_s"] > 0 and found["why"] == ""
    assert same_everywhere((settled, told, found["chunk_s"]))
    assert run.graph.n_captured == (device.type == "cuda"), run.graph.reason
    alike(run.planes(), plain.planes())
    run.sync.close()

# Steps that do not count leave everything as it is.
run = Run(**BOUNDS)
for _ in range(30):
    run.sync.tune_begin()
    run.plain_step()
    assert not run.sync.tune_end(counts=False)
assert run.sync.tuning and run.sync.chunk_size()["n_tried"] == 0
dist.barrier()
print("all the same bits", flush=True)
sys.stdout.flush()
os._exit(0)
