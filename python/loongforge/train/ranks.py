# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run: who they are by the environment, how they meet, what they agree on, how they part."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import mpi, peers
from .fault import RunError


def _number(name: str, default: int) -> int:
    """A whole number of torchrun's environment."""
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise RunError(f"{name} is '{text}', expected a whole number; hint: torchrun sets it")
    return int(text)


class Ranks:
    """Rank and world by the environment: torchrun's with a gloo group, else mpirun's or srun's with MPI."""

    def __init__(self):
        told = mpi.launched() if "WORLD_SIZE" not in os.environ else None
        self.by_mpi = told is not None
        self.rank, self.world, self.local_rank = told or (_number("RANK", 0), _number("WORLD_SIZE", 1), None)
        if self.local_rank is None:
            self.local_rank = _number("LOCAL_RANK", self.rank)
        self.owns, self.store, self.peers = False, None, None
        if not 0 <= self.rank < self.world:
            raise RunError(
                f"RANK is {self.rank} of WORLD_SIZE {self.world}, expected 0 to {self.world - 1}; hint: torchrun sets both"
            )

    def meet(self, options: dict) -> None:
        """options: section [nexus]; timeout_s is the deadline of what ranks do together from then on."""
        if self.by_mpi:
            try:
                self.peers = mpi.peers(options)
            except RuntimeError as error:
                raise RunError(str(error)) from error
            self.rank, self.world = self.peers.rank, self.peers.world
            return
        if self.world > 1 and not dist.is_initialized():
            wait_s = _number("LOONGFORGE_RENDEZVOUS_S", 120)
            ended = []
            # A thread, for torch's deadline is of each of the parts, and some last for ever when a rank goes in between.
            thread = threading.Thread(target=self._meet, args=(timedelta(seconds=wait_s), ended), daemon=True)
            thread.start()
            thread.join(wait_s + 1)
            error = ended[0] if ended else peers.PeerError("torch.distributed still waits for one")
            if error is not None:
                kind = peers.PeerError if isinstance(error, RuntimeError) else RunError  # ValueError: the environment
                raise kind(
                    f"rank {self.rank} of {self.world} did not meet the others within {wait_s} s: {peers.words(error)}; "
                    "hint: torchrun"
                ) from error
            self.owns = True
        if self.world > 1:
            self.peers = peers.of()
            self.peers.timeout_s = options["timeout_s"]

    def _meet(self, limit: timedelta, ended: list) -> None:
        try:
            self.store, _, _ = next(dist.rendezvous("env://", self.rank, self.world, timeout=limit))
            # Control by gloo; gradients on a GPU by NCCL.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=limit)
            ended.append(None)
        except Exception as error:
            ended.append(error)

    def largest(self, number: int, what: str) -> int:
        """The largest number that a rank has, on every rank."""
        return number if self.world == 1 else self.peers.largest(number, what)

    def from_first(self, work, what: str):
        """work() on rank 0, its result on every rank."""
        return work() if self.world == 1 else self.peers.from_first(work, what)

    def close(self) -> None:
        if self.owns:
            self.peers.barrier("the end of the run")  # no rank takes its end of a connection away while another still works
            dist.destroy_process_group()
        elif self.by_mpi:
            self.peers.close()
