# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py, alone or under torchrun: 20 steps of a small GR00T. Rank 0 writes gradients and losses to argv[2]."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist

from loongforge import AdamW, DataFusionLoader, LMDataset, NexusSync, accelerate
from loongforge.models.gr00t_n16 import Gr00tN16, preset

lmdb, out, micro = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if world > 1:
    dist.init_process_group("gloo")
model = Gr00tN16(
    preset("tiny").with_(d_model=32, n_layers=2, n_heads=2, expert_sizes=tuple(range(16, 48, 2)), seed=rank)
)  # unequal starts
held = accelerate(model)
sync = NexusSync(model, reduce="sum", chunk_bytes=64 << 10)
sync.broadcast_state()
model.config = model.config.with_(seed=0)  # the noise's seed is the run's, not the rank's
for layer in model.layers:
    layer.moe.config = model.config
model.reduce_stats = sync.reduce_stats
optimizer = AdamW(held, lr=1e-3)
batch_size = 16 // world // micro
loader = DataFusionLoader(LMDataset(lmdb), batch_size, image_size=64, seq_len=192, rank=rank, world=world)
losses, gradients = [], None


def forward_backward(first):
    batch = loader.next()
    ids = torch.arange(first, first + batch_size)
    out = model(batch.images, batch.tokens, batch.labels, batch.attention_mask, sample_ids=ids)
    (out.loss / micro).backward()
    return torch.tensor([out.loss_sum.item(), float(out.n_tokens)], dtype=torch.float64)


for step in range(20):
    model.set_step(step)
    total = torch.zeros(2, dtype=torch.float64)
    for m in range(micro):
        with sync.no_sync() if m + 1 < micro else contextlib.nullcontext():
            total += forward_backward((m * world + rank) * batch_size)
    total = sync.reduce_stats(total)
    losses.append((total[0] / total[1]).item())
    if step == 0:
        gradients = {b.name: b.grad.clone() for b in held.blocks}
    optimizer.step()
    optimizer.zero_grad()
digest = sum(b.param.double().sum() for b in held.blocks).reshape(1)
if world > 1:
    both = [torch.zeros_like(digest) for _ in range(world)]
    dist.all_gather(both, digest)
    assert all(torch.equal(d, digest) for d in both), "replicas differ"
if rank == 0:
    torch.save({"losses": losses, "gradients": gradients, "stats": sync.stats(), "chunks": len(sync.chunks())}, out)
loader.close()
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # see loongforge/train/__main__.py: gloo threads and the shutdown of the interpreter
