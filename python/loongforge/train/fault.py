# SPDX-License-Identifier: Apache-2.0
"""How a run of several ranks ends when it goes wrong: every rank says what it knows, writes it down, and leaves.

Leaving is `os._exit`: what a broken process group still holds may block its destructor for as long as torch's own deadline.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import NamedTuple

from torch.distributed import PrefixStore

from .. import Error
from ..peers import PeerError

LOST = 75  # exit code when other ranks are the cause: the same command with --resume may work. Also NexusSync's, over NCCL
TELL_S = 0.5  # the store may be gone with the rank that held it
RESUME = "hint: the same command with --resume goes on from the last checkpoint"


class RunError(Exception):
    """One line: what, which value, what was expected, a hint."""


class Cause(NamedTuple):
    text: str
    code: int
    known: bool  # an error that explains itself: no traceback
    lost: bool  # other ranks are the cause, as far as this one can see


def cause_of(error: BaseException) -> Cause:
    if isinstance(error, Error):
        lost = error.args[1] in ("ERR_PEER", "ERR_TIMEOUT")
        return Cause(error.args[2], LOST if lost else 1, True, lost)
    if isinstance(error, PeerError):
        return Cause(str(error), LOST, True, True)
    if isinstance(error, RunError):
        return Cause(str(error), 1, True, False)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return Cause(f"{where}{error.strerror or error}", 1, True, False)
    if isinstance(error, KeyboardInterrupt):
        return Cause(f"stopped; {RESUME}", 130, True, False)
    return Cause(f"{type(error).__name__}: {error}", 1, False, False)


class Watch:
    """Where a run is, and the way out."""

    def __init__(self, config: dict):
        self.config = config
        self.phase, self.step, self.training = "set-up", 0, False
        self.ranks = self.dir = self.sync = self.vault = None
        self.rank, self.world = 0, 1

    def enter(self, phase: str) -> None:
        self.phase = phase

    def joins(self, ranks, folder: str) -> None:
        self.ranks, self.rank, self.world, self.dir = ranks, ranks.rank, ranks.world, folder

    def begin(self) -> None:
        """Set-up is over. The report of an earlier end is no longer true."""
        self.training = True
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path())

    # ---- the end ------------------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException) -> None:
        """Ends the process; with one rank it returns, and the error goes its way."""
        if self.world == 1 or isinstance(error, SystemExit):
            return
        cause = cause_of(error)
        faulthandler.dump_traceback_later(max(self.config["nexus"]["grace_s"], 1.0), exit=True)  # whatever blocks below
        others, silent = self._exchange(cause)
        line = f"rank {self.rank} of {self.world}: {self._where()}: {cause.text}"
        line += "".join(f"; rank {r} says: {text}" for r, text in sorted(others.items()))
        if silent is None:
            line += "; the store of the ranks is gone too, which rank 0 or torchrun held"
        elif silent:
            line += f"; no word from rank {', '.join(map(str, silent))}"
        if not cause.known:
            traceback.print_exception(error)
        print(f"loongforge: {line}", file=sys.stderr, flush=True)
        if cause.lost or self.training:
            try:
                self._write(error, cause, others, silent)
            except Exception as problem:  # a full disk must not keep it from leaving
                print(f"loongforge: rank {self.rank}: no report: {problem}", file=sys.stderr, flush=True)
        self._finish_save()
        if silent and self.rank == 0:
            time.sleep(TELL_S)  # the store may end with this rank
        sys.stdout.flush()
        os._exit(cause.code)

    def _where(self) -> str:
        return f"step {self.step}, {self.phase}" if self.training else self.phase

    def _exchange(self, cause: Cause) -> tuple:
        """Tell the others why; when they are the cause, listen to what they tell.

        -> ({rank: text}, the ranks that told nothing; None: the store is gone, so nobody could)
        """
        if self.ranks.store is None:
            return {}, []
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives one
        store = PrefixStore(f"loongforge/{attempt}", self.ranks.store)
        waiting = {r for r in range(self.world) if r != self.rank} if cause.lost else set()
        heard, gone = {}, []

        def talk():
            try:
                store.set(str(self.rank), f"{self._where()}: {cause.text.split('; hint: ')[0]}"[:500])
                while waiting - heard.keys():
                    for r in waiting - heard.keys():
                        if store.check([str(r)]):
                            heard[r] = store.get(str(r)).decode()
                    time.sleep(0.02)
            except Exception as error:
                gone.append(error)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        thread.join(TELL_S)
        known = dict(heard)
        return known, None if gone and cause.lost else sorted(waiting - known.keys())

    def _path(self) -> str:
        return os.path.join(self.dir, f"fault_rank{self.rank}.json")

    def _write(self, error: BaseException, cause: Cause, others: dict, silent: list | None) -> None:
        report = {
            "rank": self.rank,
            "world": self.world,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "unix": time.time(),
            "step": self.step,
            "phase": self.phase,
            "error": cause.text,
            "other_ranks_are_the_cause": cause.lost,
            "exit_code": cause.code,
            "others": others,
            "silent": silent,
            "transport": self.sync.transport if self.sync else None,
            "collectives": self._collectives(),
            "traceback": traceback.format_exception(error),
        }
        os.makedirs(self.dir, exist_ok=True)
        with open(self._path() + ".tmp", "w") as file:
            json.dump(report, file, indent=1)
        os.replace(self._path() + ".tmp", self._path())

    def _collectives(self) -> dict:
        if self.sync is None:
            return {"gradients": [], "control": self.ranks.peers.recent() if self.ranks.peers else []}
        return self.sync.recent()

    def _finish_save(self) -> None:
        """A checkpoint that is being written is of a good step: it gets half of the time that is left."""
        if self.vault is None or not self.vault.writes:
            return

        def wait():
            try:
                self.vault.wait()
            except Exception as problem:
                print(f"loongforge: rank {self.rank}: {cause_of(problem).text}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(self.config["nexus"]["grace_s"] / 2)
