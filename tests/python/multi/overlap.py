# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py under torchrun with gloo: updates that begin while gradients are on their way are the ordinary ones."""

from contextlib import nullcontext

import ranks
import torch
from ranks import equal_everywhere, leave, rank, refused, world

from loongforge import _C, nexus
from loongforge.graph import StepGraph


class Run(ranks.Run):
    """Layers of a size that makes several runs."""

    def __init__(self, dtype=None):
        super().__init__(40, 5, dtype)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def gradients(run):
    return {b.name: b.grad for b in run.map.blocks}


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
            assert equal_everywhere(*b.values()), (dtype, clip, how)


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
        assert equal(gradients(run), gradients(want)), needs
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
refused(lambda: run.loss().backward(), "still on their way")
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
        refused(run.optimizer.step, "planted")
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
assert equal(*results) and equal_everywhere(*results[1].values())

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
    assert all(torch.isfinite(t).all() for t in after.values()) and equal_everywhere(*after.values())
    run.close()

leave("all equal")
