# SPDX-License-Identifier: Apache-2.0
"""What summing gradients over GPUs costs a step of n16: every rank alone against all together, as captured graphs, in one run.

torchrun --nproc-per-node 2 bench/nexus.py                        exposed communication, scaling, and variants of the options
torchrun --nproc-per-node 2 bench/nexus.py --variants default     only the defaults

For the bandwidth of sums by themselves: loongforge sync bench.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from loom import Ours, median_s
from report import Report

from loongforge import NexusSync
from loongforge.graph import StepGraph
from loongforge.models.gr00t_n16 import preset

MIB = 1 << 20
VARIANTS = {
    "default": {},
    "chunks 64 MiB": {"chunk_bytes": 64 * MIB},
    "chunks 256 MiB": {"chunk_bytes": 256 * MIB, "run_bytes": 256 * MIB},
    "8 CTAs": {"chunk_bytes": 64 * MIB, "max_ctas": 8},
    "16 CTAs": {"chunk_bytes": 64 * MIB, "max_ctas": 16},
    "high priority": {"chunk_bytes": 64 * MIB, "priority": -1},
    "not registered": {"chunk_bytes": 64 * MIB, "register_buffers": False},
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--grad-f32", action="store_true", help="gradients in f32: twice the bytes")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no variant later than this")
    parser.add_argument("--out", help="file that results are appended to")
    return parser.parse_args()


def slowest(seconds: float) -> float:
    """A step lasts as long as on the slowest rank."""
    times = torch.tensor([seconds])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.item()


def main():
    a, began = arguments(), time.monotonic()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    config = preset("n16").with_(attention="dense", balance_weight=0.0, n_layers=a.layers)
    report = Report(a.out) if rank == 0 else None
    ours = Ours(a, config)
    alone = slowest(median_s(ours.step, a.steps, 5))
    tokens = a.batch * a.seq
    if rank == 0:
        print(
            f"alone: {1e3 * alone:.2f} ms, {tokens / alone:,.0f} token/s a GPU; {ours.graph.reason or 'captured'}",
            file=sys.stderr,
        )
    for name in a.variants.split(","):
        if slowest(time.monotonic() - began) > a.seconds:
            break
        ours.graph.forget()
        gc.collect()
        torch.cuda.empty_cache()
        sync = NexusSync(ours.model, reduce="sum", **VARIANTS[name])
        ours.model.reduce_stats = sync.reduce_stats
        ours.graph = StepGraph(ours._forward_backward, ours.optimizer, sync=sync)
        together = slowest(median_s(ours.step, a.steps, 5))
        sync.settle()
        stats, moved = sync.stats(), sum(c["bytes"] for c in sync.chunks())
        if rank == 0:
            exposed = 100 * (1 - alone / together)
            print(
                f"{name}: {1e3 * together:.2f} ms, {world * tokens / together:,.0f} token/s on {world}, {exposed:.2f} % exposed "
                f"(finish waited {1e3 * stats['exposed_s'] / max(stats['steps'], 1):.2f} ms), {moved / 1e9:.2f} GB a step, "
                f"{len(sync.chunks())} chunks, {sync.describe()}; {ours.graph.reason or 'captured'}",
                file=sys.stderr,
            )
            label = "" if name == "default" else f"/{name}"
            report.add(f"nexus.exposed_pct{label}", round(exposed, 2), "%")
            report.add(
                f"nexus.scaling_{world}{label}",
                round(world * tokens / together),
                "token/s",
                f"{world} x alone",
                round(world * tokens / alone),
            )
        sync.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
