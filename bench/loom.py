# SPDX-License-Identifier: Apache-2.0
"""A whole training step of n16 (dense attention, no balance loss) on one GPU: LoongForge beside what PyTorch users have.

python3 bench/loom.py                        ours, the strong user with torch.compile, the stock loop; same machine, same run
python3 bench/loom.py --only ours --parts    ours alone, with the time of every kind of kernel
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time

import torch
from peers import GroupedMoE, SortedMoE, StockModel, StockMoE
from report import Report

import loongforge
from loongforge.graph import StepGraph
from loongforge.models.gr00t_n16 import Gr00tN16, preset


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=2048, help="image patches and text together")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8, help="timed steps; the median counts")
    parser.add_argument(
        "--only", default="ours,strong,compiled,stock", help="comma-separated: ours, strong, compiled, sorted, stock"
    )
    parser.add_argument("--busy", type=float, default=5, help="seconds of steps before those timed; a GPU that idled runs faster")
    parser.add_argument("--parts", action="store_true", help="profile one eager step of ours by kind of kernel")
    parser.add_argument("--grad-f32", action="store_true", help="gradients in f32; default: as a bf16 autocast step makes them")
    parser.add_argument("--moments-bf16", action="store_true", help="AdamW's moments in bf16, rounded stochastically; ours alone")
    parser.add_argument("--out", help="file that results are appended to")
    return parser.parse_args()


def median_s(step, n: int, warm: int, busy_s: float = 0) -> float:
    """Median of n steps, each waited for, after `warm` others and until they have lasted busy_s."""
    began = time.perf_counter()
    while warm > 0 or time.perf_counter() - began < busy_s:
        step()
        warm -= 1
        if warm <= 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    times = []
    for _ in range(n):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[n // 2]


def batch_of(a, config):
    g = torch.Generator(device="cuda").manual_seed(1)
    images = torch.randn(a.batch, 3, config.image_size, config.image_size, device="cuda", generator=g)
    return images, torch.randint(0, config.vocab_size, (a.batch, a.seq - config.n_patches), device="cuda", generator=g)


def fresh():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# ---- the peers ----------------------------------------------------------------------------------------------------------------


def run_peer(a, config, moe, *, fused: bool, compiled: bool, steps: int):
    """-> (s a step, peak bytes)"""
    fresh()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = StockModel(config, moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused or None)
    images, tokens = batch_of(a, config)
    called = torch.compile(model) if compiled else model

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = called(images, tokens)
        loss.backward()
        optimizer.step()

    seconds = median_s(step, steps, 3, a.busy)
    return seconds, torch.cuda.max_memory_allocated()


# ---- ours ---------------------------------------------------------------------------------------------------------------------


class Ours:
    def __init__(self, a, config, capture: bool = True):
        fresh()
        with torch.device("meta"):
            model = Gr00tN16(config)
        model = model.to_empty(device="cuda")
        with torch.no_grad():  # values do not matter for time; the spread of the router's does
            for name, p in model.named_parameters():
                p.fill_(1.0) if "norm" in name else p.normal_(0, 0.02)
        self.model = model
        self.map = loongforge.accelerate(
            model, dtype=torch.bfloat16, options={"grad_f32": a.grad_f32, "moments_bf16": a.moments_bf16}
        )
        self.optimizer = loongforge.AdamW(self.map, lr=3e-4)
        self.images, self.tokens = batch_of(a, config)
        self.graph = StepGraph(self._forward_backward, self.optimizer, enabled=capture)

    def _forward_backward(self, images, tokens):
        with torch.autocast("cuda", torch.bfloat16):
            out = self.model(images, tokens)
        out.loss.backward()
        return out.loss.detach()

    def step(self):
        return self.graph(self.images, self.tokens)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() + self.map.bytes


PARTS = (  # kind, what a kernel's name has
    ("sums over ranks", r"nccl"),
    ("experts", r"GemmUniversal|GemmGrouped|set_up_kernel"),
    ("swiglu", r"swiglu"),
    ("attention", r"fmha|flash|sdpa|cudnn.*(attn|attention|dot_do|convert_dq)|mha"),
    ("adamw", r"adamw"),
    ("norm of gradients", r"sumsq|clip"),
    ("cross-entropy", r"cross_entropy"),
    ("norm", r"add_norm|_norm"),
    ("routing", r"route|router"),
    ("rows", r"permute|combine|loom_rows"),
    ("dense products", r"nvjet|gemm|cutlass|xmma|cublas"),
    ("gradients into the map", r"loom_add|loom_scale"),
)


def profile_parts(step, longest: int = 40) -> tuple:
    """-> [(kind, ms)], largest first, of one step, and the same of kernels that no kind claims; prints the longest kernels"""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    times, rest = {}, {}
    for e in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:longest]:
        print(f"   {e.self_device_time_total / 1e3:8.3f} ms {e.count:5} x {e.key[:110]}", file=sys.stderr)
    for e in seen.key_averages():
        kind = next((k for k, pattern in PARTS if re.search(pattern, e.key, re.I)), None)
        held, key = (times, kind) if kind else (rest, e.key[:90])
        held[key] = held.get(key, 0.0) + e.self_device_time_total / 1e3
    by_time = lambda d: sorted(d.items(), key=lambda kv: -kv[1])  # noqa: E731
    return by_time(times), by_time(rest)


def run_ours(a, config, report: Report):
    ours = Ours(a, config)
    seconds = median_s(ours.step, a.steps, 5, a.busy)
    peak = ours.peak_bytes()
    if ours.graph.reason:
        print("eager: " + ours.graph.reason, file=sys.stderr)
    tokens = a.batch * a.seq
    loss = float(ours.step())
    print(
        f"ours: {1e3 * seconds:.1f} ms, {tokens / seconds:,.0f} token/s, "
        f"peak {peak / 1e9:.1f} GB (map {ours.map.bytes / 1e9:.1f}), loss {loss:.3f}, graph {ours.graph.n_captured}",
        file=sys.stderr,
    )
    if a.parts:
        ours.graph.reason = "profiled"
        ours.step()
        print(f"ours, eager: {1e3 * median_s(ours.step, 3, 1):.1f} ms", file=sys.stderr)
        times, rest = profile_parts(ours.step)
        for kind, ms in times:
            report.add(f"loom.part_ms/{kind}", round(ms, 2), "ms")
        report.add("loom.part_ms/the rest", round(sum(ms for _, ms in rest), 2), "ms")
    return seconds, peak


def main():
    a = arguments()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    config = preset("n16").with_(attention="dense", balance_weight=0.0, n_layers=a.layers)
    report, tokens, wanted = Report(a.out), a.batch * a.seq, a.only.split(",")
    if a.moments_bf16 and wanted != ["ours"]:
        sys.exit("--moments-bf16 is no fair side of a ratio; hint: --only ours")
    seconds = peak = None
    if "ours" in wanted:
        seconds, peak = run_ours(a, config, report)
        name = "loom.tok_s/moments_bf16" if a.moments_bf16 else "loom.tok_s"
        report.add(name, round(tokens / seconds), "token/s")
        report.add("loom.of_roof", round(tokens / seconds), "token/s", "sum of the best library calls (DESIGN 6)", 211000)
    peers = (
        ("strong", "grouped_mm padded, fused AdamW, eager", GroupedMoE, True, False, a.steps),
        ("compiled", "grouped_mm padded, fused AdamW, torch.compile", GroupedMoE, True, True, a.steps),
        ("sorted", "sorted loop over experts, AdamW", SortedMoE, False, False, 3),
        ("stock", "loop over experts, AdamW", StockMoE, False, False, 3),
    )
    for key, label, moe, fused, compiled, steps in peers:
        if key not in wanted:
            continue
        s, p = run_peer(a, config, moe, fused=fused, compiled=compiled, steps=steps)
        print(f"{label}: {1e3 * s:.1f} ms, {tokens / s:,.0f} token/s, peak {p / 1e9:.1f} GB", file=sys.stderr)
        if seconds is None:
            report.add(f"peer.tok_s/{key}", round(tokens / s), "token/s")
            continue
        name = {"compiled": "loom.vs_strong", "strong": "loom.vs_strong_eager"}.get(key, f"loom.vs_{key}")
        report.add(name, round(tokens / seconds), "token/s", label, round(tokens / s))
        if key in ("strong", "compiled"):
            name = "loom.peak_vs_strong" if key == "strong" else "loom.peak_vs_compiled"
            report.add(name, round(peak / 1e9, 1), "GB", label, round(p / 1e9, 1))


if __name__ == "__main__":
    main()
