# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py under torchrun with gloo: an optimizer in shares trains as the whole one, is saved and goes on.

argv: a folder for checkpoints.
"""

import os
import sys

import ranks
import torch
from ranks import equal_everywhere, leave, rank, refused, world

from loongforge import CheckpointVault, NexusSync
from loongforge.graph import StepGraph

folder = sys.argv[1]


class Run(ranks.Run):
    """Sizes that leave a rest, and chunks too small to share."""

    def __init__(self, shard, dtype=None):
        super().__init__(50, 4, dtype, shard_optimizer=shard)

    def step(self, clip=None, early=True):
        self.loss().backward()
        if clip is not None and early:
            self.optimizer.clip_next(clip)
        elif clip is not None:
            self.optimizer.clip_grad_norm_(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def planes(self):
        self.sync.gather_state()
        return super().planes()

    def close(self):
        self.sync.gather_state()
        super().close()


def alike(a, b, exact=True):
    """Sums of two ranks have one order; of more, gloo's depends on how they are cut."""
    for key in a:
        if exact and world == 2:
            assert torch.equal(a[key], b[key]), key
        else:
            torch.testing.assert_close(
                a[key].float(), b[key].float(), rtol=2e-2 if a[key].dtype == torch.bfloat16 else 1e-4, atol=1e-5
            )


# Training in shares is training: bits where the order of sums is the same (no limit to the norm), else to rounding.
for dtype in (None, torch.bfloat16):
    for clip in (None, 0.0, 0.05):
        for early in (True, False):
            whole, shares = Run(False, dtype), Run(True, dtype)
            assert shares.sync.sharded and f"shares of {world} ranks (gloo has no reduce-scatter here" in shares.sync.describe()
            for _ in range(4):
                whole.step(clip, early)
                shares.step(clip, early)
                if clip is not None:
                    torch.testing.assert_close(whole.optimizer.norm, shares.optimizer.norm, rtol=1e-5, atol=0)
            planes = shares.planes()
            alike(whole.planes(), planes, exact=not clip)
            assert equal_everywhere(*planes.values())
            whole.close()
            shares.close()

# A nan in one rank's share, or in a rest that all ranks update, keeps every rank from writing anything.
for at in ("share of rank 0", "share of the last rank", "a rest"):
    run = Run(True)
    layer, before = run.model.layers[3], run.planes()
    spoiled = layer.bias if at == "a rest" else layer.weight

    def spoil(grad, at=at):
        grad = grad.clone()
        grad.view(-1)[-1 if "last" in at else 0] = float("nan")
        return grad

    if rank == 0:
        spoiled.register_hook(spoil)
    run.loss().backward()
    run.optimizer.clip_next(0.0)
    run.optimizer.step()
    assert not torch.isfinite(run.optimizer.norm)
    after = run.planes()
    assert all(torch.equal(before[key], after[key]) for key in before), at
    run.close()

# And so is a StepGraph's.
results = []
for shard in (False, True):
    run = Run(shard)

    def forward_backward(run=run):
        loss = run.loss()
        loss.backward()
        return loss.detach()

    step = StepGraph(forward_backward, run.optimizer, sync=run.sync)
    for _ in range(4):
        step()
    results.append(run.planes())
    run.close()
alike(*results)

# A rank updates its share and nothing else; weights are everyone's after each step.
run = Run(True, torch.bfloat16)
before = {b.name: b.master.clone() for b in run.map.blocks if b.master is not None}
run.step()
assert equal_everywhere(*(b.weight for b in run.map.blocks))
changed = sum((b.master != before[b.name]).sum().item() for b in run.map.blocks if b.master is not None)
total = sum(m.numel() for m in before.values())
assert 0.8 * total / world < changed < 0.5 * total / world + 0.5 * total, (changed, total)
assert all(p.grad is None for p in run.model.parameters())

# What needs masters or moments says so instead of giving stale ones; then all of them are there.
for needs in (run.model.state_dict, run.optimizer.state_dict, run.map.release):
    refused(needs, "gather_state")
run.sync.gather_state()
assert equal_everywhere(*run.model.state_dict().values())
run.step()
run.sync.close()  # without gather_state
refused(lambda: NexusSync(run.model), "a new NexusSync needs masters")
run.loss().backward()
refused(run.optimizer.step, "gather_state")

# Whoever needs gradients gets whole ones.
whole, shares = Run(False), Run(True)
whole.loss().backward()
shares.loss().backward()
assert all(p.grad is None for p in shares.model.parameters())
shares.map.land()
alike({b.name: b.grad for b in whole.map.blocks}, {b.name: b.grad for b in shares.map.blocks})
whole.optimizer.step()
shares.optimizer.step()
alike(whole.planes(), shares.planes())

# A moved map: shares are cut anew.
for run in (whole, shares):
    run.map.replan()
    run.optimizer.zero_grad()
    run.step()
alike(whole.planes(), shares.planes())
whole.close()
shares.close()

# A checkpoint does not know of shares: saved in shares, gone on from as a whole, and the other way round.
ways = {}
for first, second in ((False, False), (True, False), (False, True), (True, True)):
    where = os.path.join(folder, f"{first}{second}")
    run = Run(first, torch.bfloat16)
    vault = CheckpointVault(where, model=run.model, diff_interval=2)
    for step in range(1, 5):
        run.step()
        if vault.due(step):
            assert vault.save(step)
            vault.wait()  # a save that finds the one before it still being written is put off
    vault.close()
    run.close()
    run = Run(second, torch.bfloat16)
    vault = CheckpointVault(where, model=run.model, diff_interval=2)
    assert vault.restore()["step"] == 4
    for _ in range(3):
        run.step()
    ways[first, second] = run.planes()
    vault.close()
    run.close()
for way in ways:
    alike(ways[False, False], ways[way])

leave("all alike")
