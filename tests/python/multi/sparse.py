# SPDX-License-Identifier: Apache-2.0
"""Run by test_sparse.py under torchrun with gloo: the sparse form through PyTorch. argv[1]: a folder for residuals."""

import os
import sys

import torch
import torch.distributed as dist
from ranks import Net, equal_everywhere, leave, loss_of, rank, refused, world

from loongforge import _C, AdamW, NexusSync, topk_allreduce
from loongforge.mapping import ParameterMap

folder = sys.argv[1]


def plain():
    """No experts to the map."""
    return Net(40, 4, experts="parts")


def mixture():
    return Net(40, 4, leave_out=False)


class Run:
    def __init__(self, dtype=None, lr=1e-2, net=plain, map_options=None, **options):
        torch.manual_seed(0)
        self.model = net()
        self.map = ParameterMap(self.model, map_options, dtype=dtype)
        self.optimizer = AdamW(self.map, lr=lr, weight_decay=0.0)
        self.sync = NexusSync(self.model, chunk_bytes=4096, **{"comm_strategy": "sparse", **options})
        self.reduced = [torch.zeros_like(b.grad, dtype=torch.float64) for b in self.map.blocks]

    def step(self, number, overlapped=False):
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(100 * number + rank))
        if overlapped:
            with self.sync.overlap_update():
                loss_of(self.model, x).backward()
        else:
            loss_of(self.model, x).backward()
            for total, b in zip(self.reduced, self.map.blocks):
                total += b.grad
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return torch.cat([b.param.detach().double().view(-1) for b in self.map.blocks])


def trained(steps, **options):
    run = Run(**options)
    for i in range(steps):
        run.step(i)
    return run


# Replicas stay the same, runs repeat, and it trains on less than it would send.
for dtype in (None, torch.bfloat16):
    run, again = trained(12, dtype=dtype), trained(12, dtype=dtype)
    assert run.sync.sparse and not run.sync.capturable and "sparse" in run.sync.why_not_capturable
    assert equal_everywhere(run.weights()) and torch.equal(run.weights(), again.weights())
    overlapped = Run(dtype=dtype)
    for i in range(12):
        overlapped.step(i, overlapped=True)
    assert torch.equal(run.weights(), overlapped.weights())
    sent = sum(c["sent_bytes"] for c in run.sync.chunks())
    stats = run.sync.stats()
    assert stats["bytes"] == 12 * sent and sent < 0.3 * sum(c["bytes"] for c in run.sync.chunks())
    assert stats["collectives"] == 24 * len(run.sync.chunks())
    for r in (run, again, overlapped):
        r.sync.close()

# What the steps sent and the last, dense one took along is what a dense training sends.
still = {"lr": 0.0}
run, dense = trained(6, **still), trained(7, comm_strategy="dense", **still)
refused(run.map.replan, "kept back")
run.sync.flush_residual()
assert _C.nexus_residual_bytes(run.sync.handle) > 0
run.step(6)
assert _C.nexus_residual_bytes(run.sync.handle) == 0
for a, b in zip(run.reduced, dense.reduced):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
run.map.replan()  # another handle: turns go on
assert (run.sync.stats()["steps"], run.sync._steps_before) == (0, 7)
lossy = trained(6, error_feedback=False, **still)
lossy.sync.flush_residual()
lossy.step(6)
assert max((a - b).abs().max().item() for a, b in zip(lossy.reduced, dense.reduced)) > 1e-4  # so the check can see
for r in (run, dense, lossy):
    r.sync.close()

# Saved after 5 steps: another run goes on bit for bit, and a dense one takes what was kept back along.
straight, cut = trained(10), trained(5)
saved = cut.sync.save_residual(folder, 5)
assert len(saved["digests"]) == world and len(os.listdir(folder)) >= 1
planes = [(b.param.detach().clone(), *(t.clone() for t in cut.optimizer.state[b.param].values())) for b in cut.map.blocks]
cut.sync.close()


def resumed(**options):
    run = Run(**options)
    with torch.no_grad():
        for b, (weight, *state) in zip(run.map.blocks, planes):
            b.param.copy_(weight)
            for mine, its in zip(run.optimizer.state[b.param].values(), state):
                mine.copy_(its)
    run.map.weights_written(run.map.blocks)
    run.sync.seek(5)
    return run


run = resumed()
assert run.sync.load_residual(folder, saved) == []
for i in range(5, 10):
    run.step(i)
assert torch.equal(run.weights(), straight.weights())
run.sync.close()
run = resumed()
dist.barrier()
if rank == 0:
    os.unlink(os.path.join(folder, "step00000005.rank1"))
dist.barrier()
(lost,) = run.sync.load_residual(folder, saved)
assert "rank 1" in lost and "dropped" in lost
run.sync.close()
straight.sync.close()
run = resumed()
for step in (6, 7, 9):
    run.sync.save_residual(folder, step)
run.sync.prune_residuals(folder, [6, 8], 7)  # 8 is damaged: the run went back to 6, and 7 is about to be saved
dist.barrier()
assert sorted(os.listdir(folder)) == sorted(f"step{s:08d}.rank{r}" for s in (6, 7, 9) for r in range(world))
run.sync.close()

# Going back within a process: what was kept back since then is dropped, and a second load adds nothing.
run = trained(5)
saved = run.sync.save_residual(folder, 5)
for _ in range(2):
    run.step(5)
    for _ in range(2):
        assert run.sync.load_residual(folder, saved) == []
    assert run.sync.save_residual(folder, 6)["digests"] == saved["digests"]
assert run.sync.load_residual(folder, None) == []
assert _C.nexus_residual_bytes(run.sync.handle) == 0
run.sync.close()


# Another choice of forms: what was kept back of chunks that are dense now goes into the next step, and nothing is lost.
everything = {"comm_strategy": "hybrid", "link_mb_s": 0.5, "topk_mb_s": 5000.0}
first = Run(lr=0.0, net=mixture, map_options={"high_load_experts": 1}, **everything)
assert {c["form"] for c in first.sync.chunks()} == {"sparse"}
for i in range(3):
    first.step(i)
saved = first.sync.save_residual(folder, 3)
for strategy in ("sparse", "dense"):
    run = Run(lr=0.0, net=mixture, map_options={"high_load_experts": 1}, comm_strategy=strategy)
    run.sync.seek(3)
    assert run.sync.load_residual(folder, saved) == []
    before = _C.nexus_residual_bytes(run.sync.handle)
    _C.nexus_begin(run.sync.handle)
    _C.nexus_cancel(run.sync.handle)
    assert _C.nexus_residual_bytes(run.sync.handle) == before > 0
    for i in (3, 4):
        run.step(i)
    held = 4 * sum(c["count"] for c in run.sync.chunks() if c["form"] == "sparse")
    assert _C.nexus_residual_bytes(run.sync.handle) == held < before
    if strategy == "sparse":
        run.sync.flush_residual()
    run.step(5)
    dense = Run(lr=0.0, net=mixture, map_options={"high_load_experts": 1}, comm_strategy="dense")
    for i in range(6):
        dense.step(i)
    for a, b, c in zip(first.reduced, run.reduced, dense.reduced):
        torch.testing.assert_close(a + b, c, rtol=0, atol=1e-6)
    for r in (run, dense):
        r.sync.close()
first.sync.close()

# A rank that cannot read its file makes it fail on all; ranks that disagree on what is kept back agree on replanning.
run = trained(5)
saved = run.sync.save_residual(folder, 5)
mine = os.path.join(folder, f"step00000005.rank{rank}")
if rank == 1:
    os.rename(mine, mine + ".away")
    os.mkdir(mine)
refused(lambda: run.sync.load_residual(folder, saved), "rank 1 could not take")
if rank == 1:
    os.rmdir(mine)
(lost,) = run.sync.load_residual(folder, saved)
refused(run.map.replan, "kept back")
run.sync.close()

# One tensor by itself: exact over the ranks.
residual, sent, given = torch.zeros(30, 10), torch.zeros(30, 10), torch.zeros(30, 10)
for i in range(6):
    grad = torch.randint(-9, 9, (30, 10), generator=torch.Generator().manual_seed(10 * i + rank)).float()
    out = topk_allreduce(grad, 0.1, residual=residual)
    assert (out != 0).sum() <= 30 and equal_everywhere(out)
    sent, given = sent + out, given + grad
dist.all_reduce(residual)
dist.all_reduce(given)
assert torch.equal(sent + residual, given)

leave("all well")
