# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py under torchrun: every_micro_step gives the gradients of reducing in the last micro-step alone, and moves
that many times the bytes."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from loongforge import AdamW, NexusSync
from loongforge.mapping import ParameterMap

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
MICRO = 3


class Net(nn.Module):
    """Branches that a micro-step may leave out: on one rank, or on all."""

    def __init__(self):
        super().__init__()
        self.body, self.branches = nn.Linear(20, 30), nn.ModuleList(nn.Linear(30, 10) for _ in range(3))

    def forward(self, x, branch):
        return self.branches[branch](self.body(x).tanh())


class Run:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = Net()
        self.map = ParameterMap(self.model)
        self.optimizer = AdamW(self.map, lr=1e-2)
        self.sync = NexusSync(self.model, "dense", chunk_bytes=4096, **options)
        self.data = torch.Generator().manual_seed(1 + rank)

    def micro_step(self, micro):
        x = torch.randn(6, 20, generator=self.data)
        branch = 0 if micro == 0 else 1 + (micro + rank) % 2  # branch 0 in the first one alone
        self.model(x, branch).square().mean().backward()

    def backward(self, overlap=False):
        for micro in range(MICRO):
            if micro + 1 < MICRO and not self.sync.every_micro_step:
                with self.sync.no_sync():
                    self.micro_step(micro)
            elif overlap:
                with self.sync.overlap_update():
                    self.micro_step(micro)
            else:
                self.micro_step(micro)

    def gradients(self):
        return torch.cat([b.grad.flatten().clone() for b in self.map.blocks])


def same_everywhere(t):
    every = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(every, t)
    return all(torch.equal(e, t) for e in every)


last, every = Run(), Run(every_micro_step=True)
assert every.sync.every_micro_step and not last.sync.every_micro_step
for step in range(4):
    last.backward()
    every.backward(overlap=step % 2 == 1)
    a, b = last.gradients(), every.gradients()
    assert same_everywhere(b), "ranks differ"
    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
    for run in (last, every):
        run.optimizer.step()
        run.optimizer.zero_grad()
stats = [run.sync.stats() for run in (last, every)]
assert stats[1]["bytes"] == MICRO * stats[0]["bytes"] and stats[0]["bytes"] == 4 * last.sync.micro_step_bytes, stats
assert "every_micro_step" in every.sync.why_not_capturable
last.micro_step(0)
try:
    last.micro_step(1)
    raise AssertionError("two reductions of one step were let through")
except RuntimeError as error:
    assert "reduced already" in str(error) or "reduced in an earlier one" in str(error), error
dist.barrier()
print("micro steps agree", flush=True)
sys.stdout.flush()
os._exit(0)
