# SPDX-License-Identifier: Apache-2.0
"""The ten-line change, on GR00T N1.6: loader, memory, communication and checkpoints of LoongForge in an ordinary training loop.

loongforge pack --scenes 400 data/example
python examples/train_gr00t_n16.py data/example --steps 60
torchrun --nproc-per-node 2 examples/train_gr00t_n16.py data/example --steps 60
"""

import argparse
import os

import torch
import torch.distributed as dist

from loongforge import AdamW, CheckpointVault, DataFusionLoader, LMDataset, MemSculptor, NexusSync
from loongforge.models.gr00t_n16 import Gr00tN16, preset


def build_model(name: str) -> torch.nn.Module:
    model = Gr00tN16(preset(name))
    for layer in model.layers:
        layer.moe.register_forward_pre_hook(MemSculptor.pre_forward_hook)
        layer.moe.register_full_backward_hook(NexusSync.backward_hook)
        for i, expert in enumerate(layer.moe.experts):
            expert.register_forward_hook(lambda module, args, out, i=i: MemSculptor.bind_to_pool(out, f"expert_{i}"))
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lmdb_path")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", default="runs/example")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", init_method="env://")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    model = build_model(args.preset)
    config = model.config
    mem_sculptor = MemSculptor(model=model, strategy="moefusion")
    mem_sculptor.set_pool_size("expert_0", 1.25 * largest_expert_bytes(model))  # head-room
    nexus_sync = NexusSync(model=model, comm_strategy="hybrid", reduce="sum")  # the loss is each rank's share of the global one
    model.reduce_stats = nexus_sync.reduce_stats
    optimizer = AdamW(mem_sculptor.map, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    checkpoint_vault = CheckpointVault(  # rank 0 writes
        save_dir=f"{args.out}/checkpoints", base_model_path=f"{args.out}/gr00t_n16_base.bin", diff_interval=50
    )

    dataset = LMDataset(args.lmdb_path)
    train_loader = DataFusionLoader(
        dataset=dataset,
        batch_size=args.batch_size,
        num_workers=0,
        pin_memory=False,
        prefetch_pipeline_depth=4,
        device=torch.device("cpu"),
        image_size=config.image_size,
        seq_len=config.max_seq_len - config.n_patches,
        rank=rank,
        world=world,
    )
    step = 0
    while step < args.steps:
        for batch in train_loader:
            model.set_step(step)
            optimizer.zero_grad()
            out = model(batch.images, batch.tokens, batch.labels, batch.attention_mask)
            out.loss.backward()  # gradients are reduced when this returns
            optimizer.step()
            step += 1
            if rank == 0 and (step % 10 == 0 or step == args.steps):
                print(f"step {step:4d}  loss {out.loss_sum.item() / max(int(out.n_tokens), 1):.4f}", flush=True)
            if checkpoint_vault.due(step):
                checkpoint_vault.save(step, {"loader": train_loader.state_dict()})
            if step == args.steps:
                break
    if not checkpoint_vault.due(step):
        checkpoint_vault.save(step)
    checkpoint_vault.merge_final_checkpoint(f"{args.out}/final_model.bin")
    checkpoint_vault.close()
    if rank == 0:
        print(f"merged checkpoint {args.out}/final_model.bin, {os.path.getsize(f'{args.out}/final_model.bin') / 2**20:.1f} MiB")
        latency, collective = train_loader.stats()["latency_p95_s"], nexus_sync.stats()["p95_s"]
        print(f"loader latency p95 {1e3 * latency:.2f} ms, collective p95 {1e3 * collective:.2f} ms")
    train_loader.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def largest_expert_bytes(model) -> int:
    return max(sum(p.numel() * p.element_size() for p in expert.parameters()) for expert in model.layers[0].moe.experts)


if __name__ == "__main__":
    main()
