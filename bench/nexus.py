# SPDX-License-Identifier: Apache-2.0
"""What summing gradients over GPUs costs a step of n16: every rank alone against all together, as captured graphs, in one run.

torchrun --nproc-per-node 2 bench/nexus.py                        scaling, waiting, variants of the options, and DDP
torchrun --nproc-per-node 2 bench/nexus.py --variants default     of our variants only the defaults

nexus.exposed_pct is the time that the step's stream waited for sums, by the device's clock; nexus.slower_pct all that a step got
longer by, also because sums and products share multiprocessors and memory. DDP goes around the same accelerated model (ddp.py).

For the bandwidth of sums by themselves: loongforge sync bench.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time

import loom
import torch
import torch.distributed as dist
from ddp import unwrap, wrap
from loom import median_s, profile_parts
from report import Report

from loongforge import _C, NexusSync
from loongforge.graph import StepGraph
from loongforge.models.gr00t_n16 import identity, preset
from loongforge.streams import stream_of
from loongforge.train.monitor import GpuMonitor

MIB = 1 << 20
VARIANTS = {
    "default": {},
    "chunks 16 MiB": {"chunk_bytes": 16 * MIB},
    "chunks 64 MiB": {"chunk_bytes": 64 * MIB},
    "chunks 256 MiB": {"chunk_bytes": 256 * MIB, "run_bytes": 256 * MIB},
    "4 CTAs": {"chunk_bytes": 64 * MIB, "max_ctas": 4},
    "8 CTAs": {"chunk_bytes": 64 * MIB, "max_ctas": 8},
    "16 CTAs": {"chunk_bytes": 64 * MIB, "max_ctas": 16},
    "16 CTAs and dense on 116 SMs": {"chunk_bytes": 64 * MIB, "max_ctas": 16, "dense_sms": 116},
    "high priority": {"chunk_bytes": 64 * MIB, "priority": -1},
    "not registered": {"chunk_bytes": 64 * MIB, "register_buffers": False},
    "shares": {"chunk_bytes": 64 * MIB, "shard_optimizer": True},
    "eager": {"captured": False},
    "eager and held back above 80 %": {"captured": False, "launch_busy_pct": 80.0},
    "shares and 16 CTAs": {"chunk_bytes": 64 * MIB, "shard_optimizer": True, "max_ctas": 16},
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm", type=int, default=20, help="steps before those timed; a GPU that idled runs faster at first")
    parser.add_argument("--grad-f32", action="store_true", help="gradients in f32: twice the bytes")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--ddp", default="25,100,100 captured", help="sizes of DDP's buckets in MB, comma-separated; '': without")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no variant later than this")
    parser.add_argument("--parts", action="store_true", help="kernels' times by kind of a step alone and of each variant")
    parser.add_argument("--out", help="file that results are appended to")
    parser.set_defaults(moments_bf16=False)  # what else loom.Ours asks for
    return parser.parse_args()


def slowest(seconds: float) -> float:
    """A step lasts as long as on the slowest rank."""
    times = torch.tensor([seconds])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.item()


def print_parts(label: str, ours) -> None:
    """Profiled on every rank, since all must step; printed by the first."""
    times, rest = profile_parts(ours.step, longest=0)
    if dist.get_rank() == 0:
        rows = [*times, ("the rest", sum(ms for _, ms in rest))]
        print(f"{label}: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in rows) + " ms", file=sys.stderr)


class Ours(loom.Ours):
    """dense_sms: multiprocessors that cuBLAS plans for in the backward pass, 0: all. Its products give each multiprocessor a
    fixed share of tiles, so one that NCCL has makes them wait for it. clock: told of each step."""

    dense_sms, clock = 0, None

    def step(self):
        if self.clock is None:
            return super().step()
        _C.clock_step_begin(self.clock)
        loss = super().step()
        _C.clock_step_end(self.clock, 0)
        return loss

    def _forward_backward(self, images, tokens):
        with torch.autocast("cuda", torch.bfloat16):
            out = self.model(images, tokens)
        out.loss.register_hook(self._limit_dense)  # runs on autograd's thread, which has a handle of its own
        out.loss.backward()
        return out.loss.detach()

    def _limit_dense(self, grad) -> None:
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libcublas.so" in line)
        if ctypes.CDLL(path).cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), self.dense_sms):
            raise RuntimeError(f"cublasSetSmCountTarget({self.dense_sms}) failed")


def start_over(ours) -> None:
    ours.graph.forget()
    gc.collect()
    torch.cuda.empty_cache()


def run_variant(a, ours, name: str, alone: float, report) -> float:
    """-> token/s of all ranks"""
    start_over(ours)
    options = dict(VARIANTS[name])
    ours.dense_sms, captured = options.pop("dense_sms", 0), options.pop("captured", True)
    sync = NexusSync(ours.model, reduce="sum", **options)
    ours.model.reduce_stats = sync.reduce_stats
    monitor = GpuMonitor(ours.map.torch_device) if "launch_busy_pct" in options else None
    if monitor:
        sync.gate(monitor.handle)
    clock = _C.clock_open()
    _C.clock_follow(clock, ours.map.device, stream_of(ours.map.torch_device))
    ours.graph = StepGraph(ours._forward_backward, ours.optimizer, clock=clock, sync=sync, overlap_update=True, enabled=captured)
    together = slowest(median_s(ours.step, a.steps, a.warm))
    ours.clock = clock
    for _ in range(a.steps):
        ours.step()
    ours.clock, times = None, _C.clock_summary(clock)
    waited = times["exposed_s"]["communication"] / times["steps"]
    if a.parts:
        print_parts(name, ours)
    sync.settle()
    held = sync.stats()["held_s"] / sync.stats()["steps"]
    moved = sum(c["bytes"] for c in sync.chunks())
    rate, scaled = sync.world * a.batch * a.seq / together, sync.world * a.batch * a.seq / alone
    if report:
        print(
            f"{name}: {1e3 * together:.2f} ms, {rate:,.0f} token/s on {sync.world} ({rate / scaled:.3f}), waited "
            f"{1e3 * waited:.2f} ms, held back {1e3 * held:.2f} ms, {moved / 1e9:.2f} GB a step, {len(sync.chunks())} chunks, "
            f"{sync.describe()}; {ours.graph.reason or 'captured'}",
            file=sys.stderr,
        )
        label = "" if name == "default" else f"/{name}"
        report.add(f"nexus.exposed_pct{label}", round(100 * waited / together, 2), "%")
        report.add(f"nexus.slower_pct{label}", round(100 * (1 - alone / together), 2), "%")
        report.add(f"nexus.scaling_{sync.world}{label}", round(rate), "token/s", f"{sync.world} x alone", round(scaled))
    sync.gather_state()
    sync.close()
    if monitor:
        monitor.close()
    ours.model.reduce_stats = identity
    return rate


def run_ddp(a, ours, name: str, best: float, report) -> None:
    """name: MB of a bucket, and perhaps 'captured'"""
    start_over(ours)
    mb, _, captured = name.partition(" ")
    aside = torch.cuda.Stream()  # where torch's notes on CUDA graphs want it made
    with torch.cuda.stream(aside):
        called = wrap(ours.model, bucket_mb=int(mb), group=dist.new_group(backend="nccl"))

    def forward_backward(images, tokens):
        with torch.autocast("cuda", torch.bfloat16):
            loss = called(images, tokens)
        loss.backward()
        return loss.detach()

    ours.graph = StepGraph(forward_backward, ours.optimizer, enabled=bool(captured), warmup=11)
    seconds = slowest(median_s(ours.step, a.steps, a.warm))
    rate = dist.get_world_size() * a.batch * a.seq / seconds
    if report:
        print(f"DDP, {name}: {1e3 * seconds:.2f} ms, {rate:,.0f} token/s; {ours.graph.reason or 'captured'}", file=sys.stderr)
        if best:
            label = "" if name == "100 captured" else f"/{name}"
            report.add(f"nexus.vs_ddp{label}", round(best), "token/s", f"DDP, buckets of {name}", round(rate))
    unwrap(ours.model)


def main():
    a, began = arguments(), time.monotonic()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    config = preset("n16").with_(attention="dense", balance_weight=0.0, n_layers=a.layers)
    report = Report(a.out) if rank == 0 else None
    ours = Ours(a, config)
    alone = slowest(median_s(ours.step, a.steps, a.warm))
    tokens = a.batch * a.seq
    if rank == 0:
        print(
            f"alone: {1e3 * alone:.2f} ms, {tokens / alone:,.0f} token/s a GPU; {ours.graph.reason or 'captured'}",
            file=sys.stderr,
        )
    if a.parts:
        print_parts("alone", ours)
    best = 0.0
    for name in filter(None, a.variants.split(",")):
        if slowest(time.monotonic() - began) > a.seconds:
            break
        best = max(best, run_variant(a, ours, name, alone, report))
    for name in filter(None, a.ddp.split(",")):
        if slowest(time.monotonic() - began) > a.seconds:
            break
        run_ddp(a, ours, name, best, report)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
