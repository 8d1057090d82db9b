# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py under torchrun with gloo: updates that begin while gradients are on their way are the ordinary ones."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from loongforge import _C, AdamW, NexusSync, nexus
from loongforge.graph import StepGraph
from loongforge.mapping import EXP_AVG, EXP_AVG_SQ, ParameterMap

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
OPTIONS = {"chunk_bytes": 4096, "run_bytes": 16384}


class Net(nn.Module):
    """Layers of a size that makes several runs; each rank leaves out one of the experts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))
        self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return sum(e(x) for i, e in enumerate(self.experts) if i != rank)


class Run:
    def __init__(self, dtype=None, **options):
        torch.manual_seed(0)
        self.model = Net()
        self.map = ParameterMap(self.model, dtype=dtype)
        plain = [b.param for b in self.map.blocks if b.param.dim() == 1]
        matrices = [b.param for b in self.map.blocks if b.param.dim() > 1]
        self.optimizer = AdamW([{"params": matrices}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, map=self.map)
        self.sync = NexusSync(self.model, **OPTIONS, **options)
        self.data = torch.Generator().manual_seed(1 + rank)

    def loss(self):
        x = torch.randn(6, 40, generator=self.data)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.model.layers[0].weight.dtype == torch.bfloat16):
            return self.model(x).float().square().mean()

    def planes(self):
        found = []
        for b in self.map.blocks:
            found += [b.weight, b.master, self.map.tensor(b, EXP_AVG), self.map.tensor(b, EXP_AVG_SQ)]
        return [t.detach().clone() for t in found if t is not None]

    def close(self):
        self.sync.close()


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def equal_everywhere(planes):
    digest = torch.stack([t.double().sum() for t in planes])
    every = [torch.zeros_like(digest) for _ in range(world)]
    dist.all_gather(every, digest)
    return all(torch.equal(d, digest) for d in every)


def train(overlapped, dtype, clip, how, steps=5):
    run, norms = Run(dtype), []

    def forward_backward():
        loss = run.loss()
        loss.backward()
        return loss.detach()

    step = StepGraph(forward_backward, run.optimizer, clip=clip or 0.0, sync=run.sync, overlap_update=overlapped)
    for _ in range(steps):
        if how == "graph":
            step()
        elif overlapped:
            with run.sync.overlap_update():
                run.loss().backward()
            if clip is not None:
                run.optimizer.clip_next(clip)
            run.optimizer.step()
            run.optimizer.zero_grad()
        else:
            run.loss().backward()
            if clip is not None:
                run.optimizer.clip_grad_norm_(clip)
            run.optimizer.step()
            run.optimizer.zero_grad()
        norms.append(run.optimizer.norm)
    assert len(run.sync.runs) > 4 and run.sync.stats()["steps"] == steps
    planes = run.planes()
    run.close()
    return planes, norms


for dtype in (None, torch.bfloat16):
    for clip in (None, 0.0, 0.05):
        for how in ("loop", "graph"):
            (a, norms), (b, others) = (train(overlapped, dtype, clip, how) for overlapped in (False, True))
            assert equal(a, b), (dtype, clip, how)
            assert norms == others, (dtype, clip, how, norms, others)
            assert equal_everywhere(b), (dtype, clip, how)


def trace(clip):
    """Waits for chunks and sweeps of one overlapped step, in their order."""
    seen = []
    wait, sweep = nexus.TorchTransport.wait, _C.loom_adamw
    nexus.TorchTransport.wait = lambda *args: (seen.append("wait"), wait(*args))[1]
    _C.loom_adamw = lambda *args: (seen.append("sweep"), sweep(*args))[1]
    try:
        run = Run()
        seen.clear()
        with run.sync.overlap_update():
            run.loss().backward()
        assert not seen
        if clip is not None:
            run.optimizer.clip_next(clip)
        run.optimizer.step()
    finally:
        nexus.TorchTransport.wait, _C.loom_adamw = wait, sweep
    assert seen.count("wait") == len(run.sync.chunks())
    run.close()
    return seen


for clip in (None, 0.0):
    seen = trace(clip)
    assert "sweep" in seen[: len(seen) // 3] and seen[-1] == "sweep", seen
seen = trace(1.0)
assert seen.index("sweep") == seen.count("wait")

# Whoever needs gradients before the update waits for all of them, and gets what the ordinary way gives.
want = Run()
want.loss().backward()
norm = want.optimizer.grad_norm()
for needs in ("grad_norm", "clip", "land", "zero_grad", "stock", "sum"):
    run = Run()
    with run.sync.overlap_update():
        run.loss().backward()
    assert all(p.grad is None for p in run.model.parameters())
    if needs == "grad_norm":
        assert run.optimizer.grad_norm() == norm
    elif needs == "clip":
        assert run.optimizer.clip_grad_norm_(1.0) == norm
    elif needs == "land":
        run.map.land()
    elif needs == "zero_grad":
        run.optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in run.model.parameters())
    elif needs == "stock":
        torch.optim.SGD(run.model.parameters(), lr=1e-2).step()
        assert not torch.equal(run.model.layers[0].weight, want.model.layers[0].weight)
    else:
        assert run.sync.sum(torch.ones(1)) == world
    if needs != "zero_grad":
        assert equal([b.grad for b in run.map.blocks], [b.grad for b in want.map.blocks]), needs
        assert all(p.grad is not None for p in run.model.parameters())
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.loss().backward()  # and the next pass is an ordinary one
    assert not run.sync.on_the_way and all(p.grad is not None for p in run.model.parameters())
    run.close()
want.close()

# A pass that would write into gradients on their way is an error on every rank.
run = Run()
with run.sync.overlap_update():
    run.loss().backward()
try:
    run.loss().backward()
    raise SystemExit("a second pass went through")
except RuntimeError as error:
    assert "still on their way" in str(error), error
run.close()

# An update that raises half-way: the rest is waited for before anything else.
run = Run()
with run.sync.overlap_update():
    run.loss().backward()
sweep, calls = _C.loom_adamw, []


def broken(*args):
    calls.append(args)
    if len(calls) == fails_at:
        raise RuntimeError("planted")
    return sweep(*args)


n_sweeps = trace(None).count("sweep")
for n in (3, n_sweeps):  # in the middle, and behind the last wait
    fails_at = n
    calls.clear()
    _C.loom_adamw = broken
    try:
        run.optimizer.step()
        raise SystemExit("the planted error got lost")
    except RuntimeError as error:
        assert "planted" in str(error)
    finally:
        _C.loom_adamw = sweep
    run.optimizer.zero_grad()
    run.loss().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    with run.sync.overlap_update():
        run.loss().backward()
run.optimizer.step()
run.close()

# A limit set for gradients that were then dropped has no part in the next step.
results = []
for overlapped in (False, True):
    run = Run()
    run.loss().backward()
    run.optimizer.clip_grad_norm_(1e-3)
    if overlapped:
        run.map.zero_grad()  # the map's: the optimizer does not hear of it
    else:
        run.optimizer.zero_grad()
    with run.sync.overlap_update() if overlapped else nullcontext():
        run.loss().backward()
    run.optimizer.step()
    results.append(run.planes())
    run.close()
assert equal(*results) and equal_everywhere(results[1])

# A norm that is not finite: with a limit nothing is written; without one what landed before it is, the same on every rank.
for clip in (1.0, 0.0):
    run = Run()
    first, last = run.model.layers[0].weight, run.model.layers[4].weight  # backward ends with the first layer
    first.register_hook(lambda grad: grad * (float("nan") if rank == 0 else 1.0))
    before = run.planes()
    before_last = last.detach().clone()
    with run.sync.overlap_update():
        run.loss().backward()
    run.optimizer.clip_next(clip)
    run.optimizer.step()
    after = run.planes()
    assert not torch.isfinite(run.optimizer.norm)
    assert equal(before, after) if clip else not torch.equal(last, before_last)
    assert all(torch.isfinite(t).all() for t in after) and equal_everywhere(after)
    run.close()

print("all equal", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # see loongforge/train/__main__.py: gloo threads and the shutdown of the interpreter
