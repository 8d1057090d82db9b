# SPDX-License-Identifier: Apache-2.0
"""What the sparse form keeps back, beside checkpoints: a file of its own a rank, and the checkpoint says which files are its."""

from __future__ import annotations

import os
import re

from . import _C, peers

_NAME = re.compile(r"step(\d+)\.rank(\d+)(\.tmp)?")


def _path(folder: str, step: int, rank: int) -> str:
    return os.path.join(folder, f"step{step:08d}.rank{rank}")


def _gather(sync, value) -> list:
    """Every rank's value, by rank."""
    return [value] if sync.world == 1 else peers.of(sync.group).gather(value, "residuals beside a checkpoint")


def _rank(sync) -> int:
    return peers.of(sync.group).rank if sync.world > 1 else 0


def save(sync, folder, step: int) -> dict | None:
    """Write this rank's file, on the disk when this returns. -> for the checkpoint's state, the same on all ranks; None: nothing

    Collective. A rank that cannot write makes it fail on all of them."""
    if not sync.sparse:
        return None
    folder = os.fspath(folder)
    try:
        mine = _C.nexus_residual_save(sync.handle, _path(folder, step, _rank(sync))), None
    except _C.Error as error:
        mine = None, error.args[2]
    files = _gather(sync, mine)
    for rank, (_, failure) in enumerate(files):
        if failure is not None:
            raise RuntimeError(f"rank {rank} could not save its residual: {failure}")
    return {"step": step, "digests": [digest for digest, _ in files]}


def load(sync, folder, saved: dict | None) -> list:
    """Take the files of a checkpoint whose state has `saved`. -> sentences on what was lost, the same on all ranks

    Collective. What was kept back before is dropped. With another number of ranks than when it was saved files are dealt out, so
    that each is taken by one rank."""
    if sync.world == 1:
        n = len(saved["digests"]) if saved else 0
        return [f"what {n} ranks had kept back of their gradients is dropped: one rank reduces nothing"] if n else []
    lost, failure = [], None
    try:
        _C.nexus_residual_drop(sync.handle)
        for rank in range(_rank(sync), len(saved["digests"]) if saved else 0, sync.world):
            lost += _take(sync, _path(os.fspath(folder), saved["step"], rank), saved["digests"][rank], rank)
    except _C.Error as error:
        failure = error.args[2]
    told = _gather(sync, (lost, failure)) if saved else [(lost, failure)]
    for rank, (_, failure) in enumerate(told):
        if failure is not None:
            raise RuntimeError(f"rank {rank} could not take what was kept back of gradients: {failure}")
    return [sentence for sentences, _ in told for sentence in sentences]


def _take(sync, path: str, digest: str, rank: int) -> list:
    try:
        _C.nexus_residual_load(sync.handle, path, digest)
        return []
    except _C.Error as error:
        if error.args[1] not in ("ERR_NOTFOUND", "ERR_CORRUPT", "ERR_FORMAT"):
            raise
        return [f"what rank {rank} had kept back of its gradients is dropped: {error.args[2]}"]


def kept_bytes(sync) -> int:
    """Of residuals that may hold something, on the rank that has most. Collective."""
    mine = _C.nexus_residual_bytes(sync.handle)
    return mine if sync.world == 1 else peers.of(sync.group).largest(mine, "what is kept back of gradients")


def prune(sync, folder, steps: list, step: int) -> None:
    """Remove files of checkpoints that are gone. steps: of those that are there, the newest last; step: the one being saved,
    whose own files, and those of a course that was given up for it, stay."""
    folder = os.fspath(folder)
    if not steps or not os.path.isdir(folder):
        return
    oldest_kept = min(steps[-1], step)
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if match and int(match[2]) % sync.world == _rank(sync) and int(match[1]) not in steps and int(match[1]) < oldest_kept:
            os.unlink(os.path.join(folder, name))
