# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py under torchrun: NexusSync's gradients beside those of DistributedDataParallel
around the same woven model; also of two forwards before one backward."""

import os
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "bench"))

from ddp import wrap

from loongforge import NexusSync
from loongforge.mapping import ParameterMap
from loongforge.models.gr00t_n16 import Gr00tN16, preset
from loongforge.woven import weave_gr00t

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
config = preset("tiny").with_(d_model=32, n_layers=2, n_heads=2, expert_sizes=tuple(range(16, 48, 2)), attention="dense", seed=3)
gradients = {}
for name in ("nexus", "nexus, two forwards", "ddp"):
    model = Gr00tN16(config.with_(balance_weight=0.0))
    held = ParameterMap(model)
    weave_gr00t(model, held)
    g = torch.Generator().manual_seed(7 + rank)
    images = torch.randn(3, 3, config.image_size, config.image_size, generator=g)
    tokens = torch.randint(0, config.vocab_size, (3, 20), generator=g)
    if name == "ddp":
        called = wrap(model, bucket_mb=1)
        called(images, tokens).backward()
    else:
        sync = NexusSync(model, chunk_bytes=64 << 10)
        model(images, tokens)  # for nothing: no backward comes
        loss = model(images, tokens).loss
        if name == "nexus, two forwards":
            loss = (loss + model(images, tokens).loss) / 2
        loss.backward()
    gradients[name] = {b.name: b.grad.clone() for b in held.blocks}
for name, theirs in gradients["ddp"].items():
    for way in ("nexus", "nexus, two forwards"):
        ours = gradients[way][name]
        assert ours.any(), name
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm(), f"{way}, {name}: {(ours - theirs).norm() / theirs.norm():.1e}"
if rank == 0:
    print(f"ddp: {len(gradients['ddp'])} gradients agree", flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)
