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

    Collective. With another number of ranks than before files are dealt out, so that each is taken by one rank."""
    if not saved:
        return []
    folder, lost, before = os.fspath(folder), [], len(saved["digests"])
    if sync.world == 1:
        return [f"what {before} ranks had kept back of their gradients is dropped: one rank reduces nothing"]
    for rank in range(_rank(sync), before, sync.world):
        try:
            _C.nexus_residual_load(sync.handle, _path(folder, saved["step"], rank), saved["digests"][rank])
        except _C.Error as error:
            if error.args[1] not in ("ERR_NOTFOUND", "ERR_CORRUPT", "ERR_FORMAT"):
                raise
            lost.append(f"what rank {rank} had kept back of its gradients is dropped: {error.args[2]}")
    return [sentence for sentences in _gather(sync, lost) for sentence in sentences]


def prune(sync, folder, steps: list) -> None:
    """Remove files of checkpoints that are gone. steps: of those that are there, the newest last."""
    folder = os.fspath(folder)
    if not steps or not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if match and int(match[2]) % sync.world == _rank(sync) and int(match[1]) not in steps and int(match[1]) < steps[-1]:
            os.unlink(os.path.join(folder, name))
