# SPDX-License-Identifier: Apache-2.0
"""Ranks that mpirun or srun started: what they tell each other beside gradients, without torch.distributed.

A transport of MPI can only sum, so all ranks but one put zeros where one has something to say.
"""

from __future__ import annotations

import atexit
import os

import torch

from . import _C
from .peers import PeerError, Peers, PeerTimeout, join_mpi
from .streams import DTYPES

# What launchers tell: Open MPI's, MPICH's hydra and srun --mpi=pmi2, srun.
_WORLDS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def _told(names: tuple) -> int | None:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def launched() -> tuple | None:
    """(rank, world, local rank) as mpirun or srun told them; None: neither started this process, or alone."""
    world, rank = _told(_WORLDS), _told(_RANKS)
    if not world or world == 1 or rank is None:
        return None
    return rank, world, _told(_LOCAL_RANKS) or 0


class MpiPeers(Peers):
    """All ranks of MPI. It is the process's: `peers()` has the one object."""

    def __init__(self, options: dict):
        options = {k: v for k, v in options.items() if k in ("mpi_library", "timeout_s")}
        self.handle = _C.mpi_open(options)
        rank, world, self.library = _C.mpi_info(self.handle)
        super().__init__(ranks=(rank, world))
        told = _told(_WORLDS)
        if told not in (None, world):
            self.handle.close()
            raise RuntimeError(
                f"{self.library} has {world} rank(s), the launcher started {told}; hint: nexus.mpi_library of the MPI that this "
                "launcher belongs to, or srun --mpi=pmix"
            )

    def _sum(self, words: torch.Tensor, what: str) -> torch.Tensor:
        """words: (n) i64 on the host, summed in place"""
        with self._recorded(what, words.numel() * words.element_size()):
            try:
                _C.mpi_sum(self.handle, words.data_ptr(), words.numel(), DTYPES[words.dtype])
            except _C.Error as error:
                kind = PeerTimeout if error.args[1] == "ERR_TIMEOUT" else PeerError
                raise kind(f"{what}: {error.args[2]}") from error
        return words

    def _numbers(self, number: int, what: str) -> list:
        numbers = torch.zeros(self.world, dtype=torch.int64)
        numbers[self.rank] = number
        return self._sum(numbers, what).tolist()

    def largest(self, number: int, what: str) -> int:
        return max(self._numbers(number, what))

    def barrier(self, what: str) -> None:
        self._numbers(0, what)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        bits = tensor.detach().view(-1).view(torch.uint8)
        words = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.uint8)
        if self.rank == 0:
            words[: bits.numel()].copy_(bits)
        self._sum(words.view(torch.int64), what)
        bits.copy_(words[: bits.numel()])

    def gather(self, value, what: str) -> list:
        mine = self._bytes(value)
        sizes = self._numbers(mine.numel(), what)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 8) * 8)
        everyone = torch.zeros(starts[-1], dtype=torch.uint8)
        everyone[starts[self.rank] : starts[self.rank] + mine.numel()] = mine
        self._sum(everyone.view(torch.int64), what)
        return [self._value(everyone[start : start + size]) for start, size in zip(starts, sizes, strict=False)]

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def close(self) -> None:
        """The process's use of MPI ends, for good where no other is left."""
        join_mpi(None)
        _held.clear()
        self.handle.close()


_held: list = []  # the one object, while it is open


def peers(options: dict | None = None) -> MpiPeers:
    """Started when first asked for, with `mpi_library` and `timeout_s` of [nexus]; ended by `close` or with the process."""
    if not _held:
        _held[:] = [MpiPeers(options or {})]
        join_mpi(_held[0])
    return _held[0]


@atexit.register
def _end() -> None:
    for one in list(_held):
        one.close()
