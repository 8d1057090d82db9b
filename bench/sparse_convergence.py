# SPDX-License-Identifier: Apache-2.0
"""Does training on the largest 15 % of gradients end where dense training ends, and does it take the error feedback for that?

sparse_convergence.py                       3 seeds x dense, sparse, sparse that forgets; tiny preset, four gloo ranks on the CPU
sparse_convergence.py --steps 60 --seeds 1  a quick look

Runs are `loongforge train` under torchrun, the same data and seeds for all three. A folder that is given again goes on where it
was interrupted. Noise is the spread of dense runs over seeds; differences are taken seed by seed, which share weights and data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from report import Report  # noqa: E402

from loongforge import _C  # noqa: E402

VARIANTS = {
    "dense": ["--nexus.comm_strategy", "dense"],
    "sparse": ["--nexus.comm_strategy", "sparse"],
    "forgetful": ["--nexus.comm_strategy", "sparse", "--nexus.error_feedback", "false"],
}
WORDS = {"dense": "dense", "sparse": "sparse, error feedback", "forgetful": "sparse, no error feedback"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--k-ratio", type=float, default=0.15)
    parser.add_argument(
        "--warmup", type=float, default=0.1, help="share of the steps, at the start, in which sparse runs are dense"
    )
    parser.add_argument("--high-load-experts", type=int, default=0, help="experts that stay dense; the library's default is 4")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--scenes", type=int, default=6000)
    parser.add_argument("--folder", help="of data and runs (default: a temporary one)")
    parser.add_argument("--out", help="file that the figures are appended to")
    parser.add_argument("more", nargs="*", help="behind --: further options of `loongforge train`")
    return parser.parse_args()


def make_data(folder: pathlib.Path, scenes: int) -> tuple:
    train, held_out = folder / f"scenes-{scenes}", folder / "held-out"
    if not train.exists():
        _C.pack_scenes(str(train), {"scenes": scenes})
    if not held_out.exists():
        _C.pack_scenes(str(held_out), {"scenes": 300, "first": 1000000000})
    return train.resolve(), held_out.resolve()


def train(args, folder: pathlib.Path, data: tuple, variant: str, seed: int, note) -> dict:
    warmup = round(args.warmup * args.steps)
    name = f"{variant}-{args.k_ratio:g}-warmup{warmup}-high{args.high_load_experts}-seed{seed}-steps{args.steps}"
    summary = folder / "runs" / name / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["steps"] >= args.steps:
        return json.loads(summary.read_text())
    options = {
        "data": data[0],
        "val_data": data[1],
        "name": name,
        "steps": args.steps,
        "batch_size": args.batch_size,
        "seed": seed,
    }
    options |= {"threads": 1, "device": "cpu", "eval_every": 0, "log_every": 10, "nexus.k_ratio": args.k_ratio}
    options |= {"nexus.sparse_warmup_steps": warmup}
    options |= {"map.high_load_experts": args.high_load_experts, "vault.diff_interval": 100}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += ["-m", "loongforge.train", "--resume", *VARIANTS[variant], *args.more]
    command += [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    log = folder / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(1)
            note(last_step(folder / "runs" / name / "log.jsonl"))
    if process.returncode:
        lines = log.read_text().splitlines()
        sys.exit(f"{name} failed, {log}:\n" + "\n".join([x for x in lines if x.startswith("loongforge: ")] or lines[-20:]))
    return json.loads(summary.read_text())


def last_step(log: pathlib.Path) -> int:
    try:
        return json.loads(log.read_bytes().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):
        return 0


class Progress:
    """One line: which run, its step, and when all of them are through. Not on a terminal: a line a quarter of a run."""

    def __init__(self, runs: int, steps: int):
        self.runs, self.steps, self.done, self.began = runs, steps, 0, time.monotonic()
        self.skipped, self.told = 0, None

    def note(self, what: str, step: int) -> None:
        part = self.done - self.skipped + step / self.steps
        spent = time.monotonic() - self.began
        left = f", {spent / part * (self.runs - self.skipped - part) / 60:.0f} min left" if part > 0.02 else ""
        quarter = what, 4 * step // self.steps
        if not sys.stderr.isatty() and quarter == self.told:
            return
        self.told = quarter
        end = "\r" if sys.stderr.isatty() else "\n"
        text = f"run {self.done + 1} of {self.runs}: {what}, step {step} of {self.steps}{left}"
        print(f"{text:<100}", end=end, file=sys.stderr, flush=True)


def spread(values: list) -> str:
    return f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"


def tell(losses: dict) -> None:
    """losses: {variant: {seed: held-out loss}}"""
    print(f"\n{'':28} {'held-out loss':>14} {'spread':>8} {'against dense':>14} {'spread':>8}   by seed")
    for variant, by_seed in losses.items():
        values = list(by_seed.values())
        differences = [by_seed[s] - losses["dense"][s] for s in by_seed] if "dense" in losses else []
        against = f"{statistics.mean(differences):+14.4f} {spread(differences):>8}" if differences else " " * 23
        by = "  ".join(f"{v:.4f}" for v in values)
        print(f"{WORDS[variant]:28} {statistics.mean(values):14.4f} {spread(values):>8} {against}   {by}")
    if "dense" in losses and len(losses["dense"]) > 1:
        noise = statistics.stdev(losses["dense"].values())
        print(f"noise: dense runs of other seeds differ by {noise:.4f} (standard deviation, n = {len(losses['dense'])})")


def main() -> None:
    args = arguments()
    seeds, variants = [int(s) for s in args.seeds.split(",")], args.variants.split(",")
    report = Report(args.out)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        data = make_data(folder, args.scenes)
        progress = Progress(len(seeds) * len(variants), args.steps)
        losses: dict = {variant: {} for variant in variants}
        for seed in seeds:
            for variant in variants:
                what = f"{WORDS[variant]}, seed {seed}"
                began = time.monotonic()
                s = train(args, folder, data, variant, seed, lambda step, what=what: progress.note(what, step))
                progress.done += 1
                progress.skipped += time.monotonic() - began < 1
                if not math.isfinite(s["val_loss"]):
                    sys.exit(f"{what}: the held-out loss is {s['val_loss']}")
                losses[variant][seed] = s["val_loss"]
                dense = losses.get("dense", {}).get(seed) if variant != "dense" else None
                more = {"seed": seed, "steps": args.steps, "ranks": args.ranks, "k_ratio": args.k_ratio}
                more |= {"train_loss": s["train_loss"], "sent_mb_a_step": s["nexus"]["bytes"] / max(s["nexus"]["steps"], 1) / 1e6}
                more |= {"warmup": args.warmup, "high_load_experts": args.high_load_experts}
                report.add(f"nexus.convergence.{variant}", s["val_loss"], "nats", "dense" if dense else "", dense, **more)
        tell(losses)


if __name__ == "__main__":
    main()
