# SPDX-License-Identifier: Apache-2.0
"""Run by test_wire.py under torchrun with gloo: f32 gradients that travel as bf16, through PyTorch."""

import torch
import torch.distributed as dist
from ranks import Net, equal_everywhere, leave, loss_of, rank, refused, world

from loongforge import AdamW, NexusSync
from loongforge.mapping import ParameterMap

EPSILON = 2.0**-8  # half a step of bf16, relative


class Run:
    def __init__(self, wire="bf16", lr=1e-2, dtype=None, map_options=None, **options):
        torch.manual_seed(0)
        self.model = Net(40, 4)
        self.map = ParameterMap(self.model, map_options, dtype=dtype)
        self.optimizer = AdamW(self.map, lr=lr, weight_decay=0.0)
        self.sync = NexusSync(self.model, chunk_bytes=4096, run_bytes=16384, wire_dtype=wire, **options)
        self.grads = None

    def step(self, number, overlapped=False):
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(100 * number + rank))
        if overlapped:
            with self.sync.overlap_update():
                loss_of(self.model, x).backward()
        else:
            loss_of(self.model, x).backward()
            self.grads = None if self.sync.sharded else [b.grad.detach().clone() for b in self.map.blocks]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return torch.cat([b.param.detach().double().view(-1) for b in self.map.blocks])

    def forms(self):
        return {c["form"] for c in self.sync.chunks()}


def trained(steps, overlapped=False, **options):
    run = Run(**options)
    for i in range(steps):
        run.step(i, overlapped)
    return run


def close(*runs):
    for run in runs:
        run.sync.close()


# Gradients: those of f32, but for one rounding a rank and one of the sum.
ours, plain = trained(1, lr=0.0), trained(1, wire="grad", lr=0.0)
assert ours.forms() == {"bf16"} and plain.forms() == {"dense"}
differ = 0
for a, b in zip(ours.grads, plain.grads):
    assert a.dtype == torch.float32 and equal_everywhere(a)
    torch.testing.assert_close(a, b, rtol=2 * EPSILON, atol=2 * world * EPSILON * b.abs().max().item())
    assert torch.equal(a * world, (a * world).bfloat16().float())  # a sum in bf16, divided
    differ += (a != b).sum().item()
assert differ > 0  # so the check can see
close(ours, plain)

# Training: replicas stay the same, runs repeat, updates that begin early have the same bits, and it goes where f32 goes.
for dtype in (None, torch.bfloat16):
    start, dense = trained(0, dtype=dtype, wire="grad"), trained(12, dtype=dtype, wire="grad")
    run, again, early = (trained(12, dtype=dtype, overlapped=o) for o in (False, False, True))
    assert equal_everywhere(run.weights())
    assert torch.equal(run.weights(), again.weights()) and torch.equal(run.weights(), early.weights())
    assert 0 < (run.weights() - dense.weights()).norm() < 0.1 * (dense.weights() - start.weights()).norm()
    chunks = run.sync.chunks()
    sent = sum(c["sent_bytes"] for c in chunks)
    assert 2 * sent == sum(c["bytes"] for c in chunks) and all(c["why"] == "wire_dtype is bf16" for c in chunks)
    assert run.sync.stats()["bytes"] == 12 * sent
    close(start, dense, run, again, early)

# Beside sparse chunks, another chunk size, a map that is planned anew, shares.
run = trained(4, comm_strategy="sparse", map_options={"high_load_experts": 1})
assert run.forms() == {"sparse", "bf16"}
assert equal_everywhere(run.weights())
close(run)
run = trained(3)
run.sync.retune(16384)
for i in range(3, 6):
    run.step(i)
run.map.replan()
for i in range(6, 9):
    run.step(i)
assert equal_everywhere(run.weights()) and run.forms() == {"bf16"}
close(run)
whole, shared = trained(6), trained(6, shard_optimizer=True)
assert equal_everywhere(shared.weights())
if world == 2:  # sums of two have one order
    assert torch.equal(whole.weights(), shared.weights())
close(whole, shared)

# Reduced in every micro-step: what earlier ones left is rounded anew, and is the same everywhere.
sums = []
for wire in ("bf16", "grad"):
    run = Run(wire, every_micro_step=True)
    for micro in range(3):
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(7 + 10 * micro + rank))
        loss_of(run.model, x).backward()
    sums.append(torch.cat([b.grad.detach().flatten() for b in run.map.blocks]))
    close(run)
assert equal_everywhere(sums[0]) and not torch.equal(*sums)
torch.testing.assert_close(*sums, rtol=6 * EPSILON, atol=6 * world * EPSILON * sums[1].abs().max().item())

# A link that is told: each group goes by what it costs.
for mb_s, form in ((50.0, "bf16"), (20000.0, "dense")):
    run = Run(link_mb_s=mb_s, topk_mb_s=1.0)
    assert run.forms() == {form} and all("bf16 wins below 2000 MB/s" in c["why"] for c in run.sync.chunks())
    close(run)

refused(lambda: Run(wire="bf16" if rank else "grad"), "wire_dtype")
dist.barrier()
leave("all well")
