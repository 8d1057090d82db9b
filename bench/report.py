# SPDX-License-Identifier: Apache-2.0
"""Figures of a bench program: one JSON object a line, named as DESIGN says, on stdout and into a file when asked."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import torch


def machine() -> str:
    if not torch.cuda.is_available():
        return f"{os.cpu_count()} CPU cores, torch {torch.__version__}"
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    ).stdout.split("\n")[0]
    return (
        f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}, "
        f"torch {torch.__version__}"
    )


def commit() -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    found = subprocess.run(
        ["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return os.environ.get("LOONGFORGE_COMMIT") or found or "unknown"


class Report:
    def __init__(self, path: str | None = None):
        self.file = open(path, "a") if path else None
        self.common = {"machine": machine(), "commit": commit(), "command": shlex.join(["python3", *sys.argv])}

    def add(self, name: str, value: float, unit: str, peer: str = "", peer_value: float | None = None, **more) -> None:
        """ratio: value / peer_value"""
        row = {"name": name, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value}
        row["ratio"] = value / peer_value if peer_value else None
        line = json.dumps({**row, **more, **self.common})
        print(line, flush=True)
        if self.file:
            self.file.write(line + "\n")
            self.file.flush()
