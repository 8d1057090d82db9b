# SPDX-License-Identifier: Apache-2.0
"""What programs run under torchrun with gloo share: the ranks, a net of which each leaves out a part, looks at the others.

Importing it meets the other ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from loongforge import AdamW, NexusSync
from loongforge.mapping import EXP_AVG, EXP_AVG_SQ, ParameterMap

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)


class Net(nn.Module):
    """Layers and then experts, more than there are ranks, of which each rank leaves out one (leave_out=False: none)."""

    def __init__(self, size, n_layers, experts="experts", leave_out=True):
        """experts: name of their list; under another one than `experts` the map takes them for ordinary layers."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(n_layers))
        self.add_module(experts, nn.ModuleList(nn.Linear(size, size) for _ in range(world + 1)))
        self.used = [e for i, e in enumerate(getattr(self, experts)) if i != rank or not leave_out]

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return sum(e(x) for e in self.used)


def loss_of(model, x):
    """In bf16 where the model's weights are."""
    with torch.autocast("cpu", torch.bfloat16, enabled=model.layers[0].weight.dtype == torch.bfloat16):
        return model(x).float().square().mean()


class Run:
    """A net with two groups of parameters, reduced in several runs of chunks. options: NexusSync's."""

    def __init__(self, size, n_layers, dtype=None, **options):
        torch.manual_seed(0)
        self.model, self.size = Net(size, n_layers), size
        self.map = ParameterMap(self.model, dtype=dtype)
        plain = [b.param for b in self.map.blocks if b.param.dim() == 1]
        matrices = [b.param for b in self.map.blocks if b.param.dim() > 1]
        self.optimizer = AdamW([{"params": matrices}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, map=self.map)
        self.sync = NexusSync(self.model, chunk_bytes=4096, run_bytes=16384, **options)
        self.data = torch.Generator().manual_seed(1 + rank)

    def loss(self):
        return loss_of(self.model, torch.randn(6, self.size, generator=self.data))

    def planes(self):
        """Copies of everything that is trained: {(parameter, role): values}"""
        return {
            (b.name, role): tensor.detach().clone()
            for b in self.map.blocks
            for role in ("weight", "master", EXP_AVG, EXP_AVG_SQ)
            if (tensor := getattr(b, role) if isinstance(role, str) else self.map.tensor(b, role)) is not None
        }

    def close(self):
        self.sync.close()


def equal_everywhere(*tensors):
    """Every rank has the same values. Collective."""
    mine = torch.cat([t.detach().double().reshape(-1) for t in tensors])
    every = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)
    return all(torch.equal(t, mine) for t in every)


def refused(fn, words):
    """fn() raises a RuntimeError that says these words."""
    try:
        fn()
    except RuntimeError as error:
        assert words in str(error), error
        return
    raise SystemExit(f"nothing said {words}")


def leave(words):
    """The end: words tell the test that this rank came so far."""
    print(words, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see loongforge/train/__main__.py: gloo threads and the shutdown of the interpreter
