# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a progress bar on a terminal, lines elsewhere, a JSON line a step in the run's folder."""

from __future__ import annotations

import json
import os
import sys
import time

PARTS = ("compute", "data", "communication", "io", "optimizer")


class Console:
    """Only rank 0 speaks. `line` prints above the bar."""

    def __init__(self, enabled: bool, total: int, start: int):
        self.enabled, self.total = enabled, total
        self.started = time.monotonic()
        self.bar = None
        if enabled and sys.stderr.isatty():
            from rich.console import Console as Rich
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Rich(stderr=True),
            )
            self.task = self.bar.add_task("training", total=total, completed=start)
            self.bar.start()

    def line(self, text: str) -> None:
        if not self.enabled:
            return
        if self.bar:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def advance(self, step: int, description: str) -> None:
        if self.bar:
            self.bar.update(self.task, completed=step, description=description)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None


def step_line(step: int, total: int, row: dict) -> str:
    line = f"step {step:>6}/{total}  loss {row['loss']:.4f}  lr {row['lr']:.2e}"
    if "exposed_s" not in row:
        return line
    times = " ".join(f"{name} {1e3 * row['exposed_s'][name]:.0f}" for name in PARTS)
    return f"{line}  {row['tokens_per_s']:,.0f} token/s  ms: {times}"


class StepLog:
    """runs/<name>/log.jsonl: one object a step. Resuming drops rows behind the step it goes on from, whole or torn.

    unlogged: rows of steps that the checkpoint holds and that were not written yet when it was taken.
    """

    def __init__(self, path: str, resumed_from: int, unlogged: list, enabled: bool):
        self.file = None
        if not enabled:
            return
        kept, last = [], 0
        if resumed_from and os.path.exists(path):
            with open(path) as file:
                for line in file:
                    try:
                        step = json.loads(line)["step"]
                        if step <= resumed_from:
                            kept.append(line)
                            last = step
                    except (ValueError, KeyError):
                        break  # torn by the kill
        kept += [json.dumps(row) + "\n" for row in unlogged if row["step"] > last]
        with open(path + ".tmp", "w") as file:
            file.writelines(kept)
        os.replace(path + ".tmp", path)
        self.file = open(path, "a", buffering=1)

    def write(self, row: dict) -> None:
        if self.file:
            self.file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        if self.file:
            self.file.close()
