# SPDX-License-Identifier: Apache-2.0
"""LoongForge: training acceleration for 1B-3B mixture-of-experts models.

`import loongforge` needs no torch. The names below load what they need when they are first touched.
"""

from __future__ import annotations

import importlib

_LAZY = {
    "DataFusionLoader": "loader",
    "LMDataset": "loader",
    "MemSculptor": "sculptor",
    "NexusSync": "nexus",
    "topk_allreduce": "topk",
    "nccl_allreduce": "nexus",
    "CheckpointVault": "vault",
    "AdamW": "optim",
    "ParameterMap": "mapping",
    "accelerate": "acceleration",
    "undo": "acceleration",
    "StepGraph": "graph",
}
__all__ = [*_LAZY, "Error", "__version__"]


def __getattr__(name: str):
    if name in ("Error", "__version__"):
        from . import _C

        version, _ = _C.version()
        values = {"Error": _C.Error, "__version__": version}
    elif name in _LAZY:
        module = importlib.import_module(f".{_LAZY[name]}", __name__)
        values = {name: getattr(module, name)}
    else:
        raise AttributeError(f"module 'loongforge' has no attribute {name!r}")
    globals().update(values)
    return values[name]


def __dir__():
    return sorted(__all__)
