# SPDX-License-Identifier: Apache-2.0
"""The ranks of a process group, or of MPI: small collectives that end within a deadline, are named in errors and are remembered.

Gradients go through NexusSync; this is for what ranks tell each other beside them.
"""

from __future__ import annotations

import pickle
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

KEPT = 32
_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# A collective that failed may still write into its tensors, when a rank that was stopped goes on: they live until the end.
abandoned: list = []


class PeerError(RuntimeError):
    """Another rank did not take part: it ended, or broke off the connection."""


class PeerTimeout(PeerError, TimeoutError):
    """Another rank did not come in time."""


def words(error: BaseException) -> str:
    """An error of torch.distributed without its source lines, stack and advice."""
    text = str(error).strip()
    text = re.sub(r"^\[\S+?:\d+\]\s*", "", text.splitlines()[0] if text else type(error).__name__)
    return text.split(". This is typically", 1)[0].rstrip(".")


_mpi: Peers | None = None  # where mpirun or srun started the ranks


def join_mpi(ranks: Peers | None) -> None:
    """The run's ranks are MPI's from now on, unless torch.distributed is initialised. None: no longer."""
    global _mpi
    _mpi = ranks


def _by_torch() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_of(group=None) -> int:
    """How many ranks there are; 1 where nothing says otherwise."""
    return of(group).world if isinstance(group, Peers) or _by_torch() or _mpi else 1


def torch_world_of(group, call: str) -> int:
    """The same for a call that works over torch.distributed alone: ranks of MPI are refused, not taken for one."""
    if not _by_torch() and world_of(group) > 1:
        raise RuntimeError(f"{call} works over torch.distributed, which is not initialised; hint: NexusSync sums over MPI")
    return world_of(group)


def of(group=None) -> Peers:
    """The one object of this group in this process."""
    if isinstance(group, Peers):
        return group
    if _mpi is not None and not _by_torch():
        return _mpi
    key = group if group is not None else dist.group.WORLD
    if key not in _groups:
        _groups[key] = Peers(group)
    return _groups[key]


class Peers:
    """timeout_s: the deadline of one collective; None: the group's own.

    All ranks call the same in the same order. Each call takes `what`, words for errors and reports.
    """

    def __init__(self, group=None, ranks: tuple | None = None):
        """ranks: (rank, world) of ranks that are no process group's"""
        self._group, self.timeout_s = weakref.ref(group) if group is not None else lambda: None, None
        self.rank, self.world = ranks or (dist.get_rank(group), dist.get_world_size(group))
        self._recent: deque = deque(maxlen=KEPT)
        self._n = 0

    @property
    def group(self):
        """What torch.distributed takes; None: the default group."""
        return self._group()

    # ---- calls --------------------------------------------------------------------------------------------------------------

    def largest(self, number: int, what: str) -> int:
        """The largest of the ranks' numbers."""
        value = torch.tensor([number], device=self._device())
        self._run(what, dist.all_reduce, value, dist.ReduceOp.MAX)
        return int(value)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Rank 0's values, in place."""
        self._run(what, dist.broadcast, tensor, self._root())

    def share(self, value, what: str):
        """Rank 0's value, of any kind that pickles, on every rank."""
        data = self._bytes(value) if self.rank == 0 else None
        size = torch.tensor([0 if data is None else data.numel()], device=self._device())
        self.broadcast(size, what)
        if data is None:
            data = torch.empty(int(size), dtype=torch.uint8, device=self._device())
        self.broadcast(data, what)
        return value if self.rank == 0 else self._value(data)

    def from_first(self, work: Callable, what: str):
        """work() on rank 0, however long it takes; its result on every rank, or PeerError with its error.

        The others hear from rank 0 several times in `timeout_s`, so one that is dead or stopped is told from one that works.
        """
        if self.rank:
            return self._hear(what)
        stop, problem = threading.Event(), []
        beats = threading.Thread(target=self._beat, args=(what, stop, problem), daemon=True)
        beats.start()
        answer = ("failed", "no result")
        try:
            answer = ("done", work())
        except BaseException as error:
            answer = ("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            stop.set()
            beats.join()
            if problem and answer[0] == "done":
                raise problem[0]
            if not problem:
                self.share(answer, what)
        return answer[1]

    def _hear(self, what: str):
        before = self.timeout_s
        if self._device().type == "cuda":  # no beats come there
            self.timeout_s = None
        try:
            while True:
                state, value = self.share(None, what)
                if state == "failed":
                    raise PeerError(f"{what}: rank 0: {value}")
                if state == "done":
                    return value
        finally:
            self.timeout_s = before

    def _beat(self, what: str, stop: threading.Event, problem: list) -> None:
        """Gradients of a GPU's own backend have no thread to spare: there the group's deadline has to do."""
        while not stop.wait((self.timeout_s or 30.0) / 4):
            if self._device().type == "cuda":
                continue
            try:
                self.share(("working", None), what)
            except BaseException as error:
                problem.append(error)
                return

    def gather(self, value, what: str) -> list:
        """Every rank's value, in order of ranks."""
        data = self._bytes(value)
        room = self.largest(data.numel(), what)
        own = torch.zeros(room + 8, dtype=torch.uint8, device=data.device)
        own[:8] = torch.tensor([data.numel()]).view(torch.uint8)
        own[8 : 8 + data.numel()] = data
        everyone = [torch.empty_like(own) for _ in range(self.world)]
        self._run(what, dist.all_gather, everyone, own)
        return [self._value(t[8 : 8 + int(t[:8].cpu().view(torch.int64))]) for t in everyone]

    def barrier(self, what: str) -> None:
        self._run(what, dist.all_reduce, torch.zeros(1, device=self._device()))

    def recent(self) -> list:
        """The newest calls, oldest first: sequence number, what, bytes, seconds, and whether it is done."""
        now = time.monotonic()
        rows = [dict(row) for row in list(self._recent)]
        for row in rows:
            began = row.pop("began")
            if row["state"] == "under way":
                row["seconds"] = now - began
        return rows

    # ---- one call -----------------------------------------------------------------------------------------------------------

    def _run(self, what: str, call, *args) -> None:
        work = None
        with self._recorded(what, sum(t.numel() * t.element_size() for t in args if isinstance(t, torch.Tensor))):
            try:
                work = call(*args, group=self.group, async_op=True)
                self.wait(work, self.timeout_s)
            except BaseException as error:
                abandoned.append((work, args))
                if isinstance(error, PeerError):
                    raise type(error)(f"{what}: {error}") from error
                raise

    @contextmanager
    def _recorded(self, what: str, n_bytes: int):
        row = {"seq": self._n, "what": what, "bytes": n_bytes, "state": "under way", "began": time.monotonic()}
        self._n += 1
        self._recent.append(row)
        try:
            yield
            row["state"] = "done"
        except BaseException:
            row["state"] = "failed"
            raise
        finally:
            row["seconds"] = time.monotonic() - row["began"]

    def wait(self, work, limit: float | None) -> None:
        """Until a collective is done, for `limit` seconds at most. PeerError, PeerTimeout."""
        began = time.monotonic()
        try:
            work.wait(*([] if limit is None else [timedelta(seconds=limit)]))
        except RuntimeError as error:
            took = time.monotonic() - began
            if "imed out" in str(error) or (limit is not None and took >= 0.9 * limit):
                raise PeerTimeout(
                    f"no answer from the other ranks within {took if limit is None else limit:g} s; hint: look at rank logs, a "
                    "peer may have died"
                ) from error
            raise PeerError(f"{words(error)}: a rank has ended or left; hint: look at rank logs for the first error") from error

    def _root(self) -> int:
        return dist.get_global_rank(self.group, 0) if self.group else 0

    def _device(self) -> torch.device:
        on_gpu = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _bytes(self, value) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device())

    @staticmethod
    def _value(data: torch.Tensor):
        return pickle.loads(data.cpu().numpy().tobytes())
