# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py under torchrun with gloo: experts without a token on any rank do not move, and nothing else changes."""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from loongforge import AdamW, NexusSync, accelerate
from loongforge.models.gr00t_n16 import Gr00tN16, preset
from loongforge.woven import weave_gr00t

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)


def train(steps=4, micro=1, **options):
    torch.manual_seed(0)
    config = preset("tiny").with_(attention="dense", d_model=32, n_layers=2, n_heads=2, expert_sizes=tuple(range(16, 48, 2)))
    model = Gr00tN16(config)
    held = accelerate(model)
    weave_gr00t(model, held)  # as on a GPU
    assert len(held.expert_sets) == 2
    sync = NexusSync(model, reduce="sum", chunk_bytes=4096, **options)
    model.reduce_stats = sync.reduce_stats
    optimizer = AdamW(held, lr=1e-3)
    data = torch.Generator().manual_seed(1 + rank)
    for step in range(steps):
        model.set_step(step)
        for m in range(micro):
            images = torch.randn(1, 3, config.image_size, config.image_size, generator=data)
            tokens = torch.randint(0, 200, (1, 4), generator=data)
            with torch.no_grad():
                model(images, tokens)  # counts for nothing
            out = model(images, tokens)
            if m + 1 < micro:
                with sync.no_sync():
                    out.loss.backward()
            else:
                out.loss.backward()
        grads = {b.name: b.grad.clone() for b in held.blocks if b.grad is not None and not options.get("shard_optimizer")}
        optimizer.step()
        optimizer.zero_grad()
    sync.gather_state()
    return grads, {b.name: b.weight.detach().clone() for b in held.blocks}, sync, model


for options in ({}, {"micro": 2}, {"shard_optimizer": True}):
    grads, weights, sync, _ = train(**options)
    moved = sync.stats()
    sync.close()
    assert moved["skipped"] == 0
    others, again, sync, _ = train(skip_empty=True, **options)
    stats = sync.stats()
    assert not sync.capturable and "skip_empty" in sync.why_not_capturable
    sync.close()
    assert stats["collectives"] + stats["skipped"] == moved["collectives"], (stats, moved)
    assert stats["bytes"] + stats["skipped_bytes"] == moved["bytes"] and stats["skipped"] > 0, stats
    for name, weight in weights.items():
        if world == 2:
            assert torch.equal(again[name], weight), (options, name)
        else:
            torch.testing.assert_close(again[name], weight)
    assert all(torch.equal(grads[name], others[name]) for name in grads) or world > 2
    print(f"{options}: {stats['skipped']} of {moved['collectives']} chunks skipped", file=sys.stderr)

# A whole model that is run again by its backward is counted in time. Experts that run again after ranks have told each other are
# an error, not a lost gradient.
_, _, sync, model = train(steps=1, skip_empty=True)
images, tokens = torch.randn(1, 3, model.config.image_size, model.config.image_size), torch.randint(0, 200, (1, 4))
checkpoint(lambda i, t: model(i, t).loss, images, tokens, use_reentrant=False).backward()
model.zero_grad()


def run_again(grad):
    with torch.enable_grad():
        next(iter(sync.map.expert_sets)).begin()


last = next(p for p in model.parameters() if p.requires_grad)  # used first, so its gradient comes last
last.register_hook(run_again)
try:
    model(images, tokens).loss.backward()
    raise SystemExit("a forward inside backward was not noticed")
except RuntimeError as error:
    assert "skip_empty = false" in str(error), error

print("all the same", flush=True)
sys.stdout.flush()
os._exit(0)  # see loongforge/train/__main__.py: gloo threads and the shutdown of the interpreter
