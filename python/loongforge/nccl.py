# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a process group can use NCCL directly, and how they meet."""

from __future__ import annotations

import os
import socket

import torch

from . import _C, Error, peers


def _local(device: torch.device, options: dict) -> dict:
    """What this rank has: its GPU by host and identity, and NCCL's version or why there is none."""
    found = {"gpu": None, "version": None, "why": None}
    if device.type != "cuda":
        found["why"] = f"the model is on {device}"
        return found
    properties = torch.cuda.get_device_properties(device)
    found["gpu"] = (socket.gethostname(), os.environ.get("NCCL_HOSTID"), str(getattr(properties, "uuid", device.index)))
    try:
        found["version"] = _C.nccl_version({k: v for k, v in options.items() if k == "nccl_library"})[1]
    except Error as error:
        found["why"] = error.args[2]
    return found


def judge(ranks: list) -> str | None:
    """None when these ranks (of `_local`) can sum by NCCL, otherwise the reason."""
    for rank, found in enumerate(ranks):
        if found["why"]:
            return f"rank {rank}: {found['why']}"
    gpus = [found["gpu"] for found in ranks]
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            return f"ranks {gpus.index(gpu)} and {rank} share a GPU, and NCCL wants one each"
    versions = {found["version"] for found in ranks}
    if len(versions) > 1:
        return f"the ranks have different versions of NCCL: {', '.join(sorted(versions))}"
    return None


def why_not(device: torch.device, group, options: dict) -> str | None:
    """None when all ranks of the group can use NCCL, otherwise the reason, the same on every rank. Collective."""
    return judge(peers.of(group).gather(_local(device, options), "which GPUs the ranks have"))


def meet(group, options: dict) -> tuple:
    """What `_C.nexus_open` takes as a transport: this rank, the world and rank 0's id. Collective."""
    met, own = peers.of(group), None
    if met.rank == 0:
        try:
            own = _C.nccl_id({k: v for k, v in options.items() if k == "nccl_library"})
        except Error as error:
            own = error.args[2]  # the others must not wait for an id that never comes
    id_bytes = met.share(own, "the id by which ranks meet")
    if not isinstance(id_bytes, bytes):
        raise RuntimeError(f"rank 0 could not open a meeting of ranks: {id_bytes}")
    return "nccl", met.rank, met.world, id_bytes
