# SPDX-License-Identifier: Apache-2.0
"""Beside the steps: what the GPU reports of itself, and by how much ranks wait for one another."""

from __future__ import annotations

import torch

from .. import _C, Error


class GpuMonitor:
    """Samples this rank's GPU every 50 ms, without touching its streams. `note`: why it does not."""

    def __init__(self, device: torch.device, library: str | None = None):
        self.handle, self.note = None, None
        if device.type != "cuda":
            return
        try:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self.handle = _C.monitor_open(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", 0, library)
        except Error as error:
            self.note = f"the GPU is not watched: {error.args[2]}"

    def summary(self) -> dict | None:
        return _C.monitor_summary(self.handle) if self.handle else None

    def close(self) -> None:
        if self.handle:
            self.handle.close()


class Skew:
    """How long each rank's last gradient came before the slowest rank's, a step.

    All ranks see the end of a step's reductions at the same time, so one that had its own gradients earlier waits so much longer:
    no clocks are compared. The slowest rank's wait is what the reductions themselves take."""

    def __init__(self, world: int):
        self.waited, self.steps = 0.0, 0
        self.total, self.most, self.last = [0.0] * world, 0.0, [0] * world
        self.n = 0

    def add(self, waited_s: float) -> None:
        """A step of this rank, as its times come."""
        self.waited += waited_s
        self.steps += 1

    def mean(self) -> float | None:
        """A step since the last call; None without one."""
        mean = self.waited / self.steps if self.steps else None
        self.waited, self.steps = 0.0, 0
        return mean

    def take(self, means: list) -> list | None:
        """means: every rank's, by rank -> by how much it was ahead, in seconds"""
        if None in means:
            return None
        lowest = min(means)
        ahead = [m - lowest for m in means]
        self.total = [t + a for t, a in zip(self.total, ahead)]
        self.most = max(self.most, *ahead)
        self.last[ahead.index(0.0)] += 1
        self.n += 1
        return ahead

    def summary(self) -> dict | None:
        if not self.n:
            return None
        return {
            "ahead_s": [t / self.n for t in self.total],
            "most_s": self.most,
            "last_rank": self.last.index(max(self.last)),
            "last_share": max(self.last) / self.n,
        }


def chunk_text(size: dict) -> str:
    """size: NexusSync.chunk_size(), with something tried -> the line when tuning ends, or the run before it"""
    found = f"chunk size {size['chunk_bytes']:,} bytes"
    if not size["settled"]:
        return f"{found} when the run ended, not settled: {size['n_tried']} of {size['n_sizes']} sizes tried"
    text = f"{found}: settled, {size['n_sizes']} sizes tried"
    if not (size["first_s"] and size["chunk_s"]):
        return f"{text}, no times were had"
    if size["chunk_bytes"] == size["first_bytes"]:
        return f"{text}, none is 2 % quicker than the first ({1e3 * size['first_s']:.1f} ms a step)"
    gain = 100 * (1 - size["chunk_s"] / size["first_s"])
    times = f"{1e3 * size['first_s']:.1f} to {1e3 * size['chunk_s']:.1f} ms a step"
    return f"{text}, {gain:.1f} % quicker than {size['first_bytes']:,} ({times})"


def comm_text(nexus: dict, skew: dict | None) -> str:
    """nexus: NexusSync.stats() -> the line at the end of a run of several ranks"""
    line = (
        f"collectives: {nexus['collectives']}, p50/p95/p99 {1e3 * nexus['p50_s']:.2f}/{1e3 * nexus['p95_s']:.2f}/"
        f"{1e3 * nexus['p99_s']:.2f} ms, bus bandwidth {nexus['bus_bytes_s'] / 1e9:.2f} GB/s, "
        f"{100 * nexus['exposed_share']:.0f} % of their time exposed"
    )
    if skew:
        line += (
            f"; ranks ahead of the slowest by {1e3 * max(skew['ahead_s']):.1f} ms a step at most on average, rank "
            f"{skew['last_rank']} last in {100 * skew['last_share']:.0f} %"
        )
    return line
