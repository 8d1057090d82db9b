# SPDX-License-Identifier: Apache-2.0
"""Run by test_faults.py: three forked ranks of a gloo group. peers_ranks.py CASE FOLDER; each rank writes what it saw, a line."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from loongforge import Error, NexusSync, peers

WORLD = 3


def calls(rank: int) -> str:
    them = peers.of()
    assert them is peers.of() and (them.rank, them.world) == (rank, WORLD)
    assert them.largest(10 + rank, "numbers") == 12
    assert them.share({"a": [rank]}, "a value") == {"a": [0]}
    assert them.gather("x" * 100 * rank, "texts") == ["", "x" * 100, "x" * 200]
    them.timeout_s = 0.4  # rank 0 works for longer than that, and is heard
    assert them.from_first(lambda: time.sleep(1.2) or 42, "slow work") == 42
    rows = them.recent()
    assert [r["seq"] for r in rows] == list(range(len(rows))) and {r["state"] for r in rows} == {"done"}
    assert rows[0]["what"] == "numbers" and rows[0]["bytes"] == 8 and rows[-1]["what"] == "slow work"
    return "all good"


def first_fails(rank: int) -> str:
    def work():
        raise OSError("the disk is full")

    try:
        peers.of().from_first(work, "saving")
    except (OSError, peers.PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def stopped(rank: int) -> str:
    """A user's own loop: one rank is stopped. NexusSync raises on the others, closes, and the process comes to its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    sync = NexusSync(model, timeout_s=1.0, chunk_bytes=4096)
    for step in range(4):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            model(torch.ones(2, 64)).sum().backward()
        except Error as error:
            failed = [c for c in sync.recent()["gradients"] if c["state"] == "failed"]
            began = time.monotonic()
            sync.close()
            assert time.monotonic() - began < 5, "close() waits for others"
            return f"{error.args[1]}: {error.args[2]} | {len(failed)} failed, chunk {failed[0]['chunk']}"
        model.zero_grad()
    return "no error"


def desync(rank: int) -> str:
    """With debug every rank is told that one makes another call, instead of waiting for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    sync = NexusSync(model, timeout_s=20.0, chunk_bytes=4096, debug=True)
    try:
        for step in range(3):
            if step == 2 and rank == 1:
                sync.sum(torch.zeros(5))
            model(torch.ones(2, 64)).sum().backward()
            model.zero_grad()
    except Error as error:
        return f"step {step}, {error.args[1]}: {error.args[2]}"
    return "no error"


def child(case: str, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=limit)
    line = globals()[case](rank)
    with open(f"{folder}/rank{rank}", "w") as file:
        file.write(line)
    if case != "stopped":
        os._exit(0)
    sys.exit(3)  # the interpreter's own end, which gloo would block


if __name__ == "__main__":
    pids = []
    for r in range(WORLD):
        pid = os.fork()
        if pid == 0:
            child(sys.argv[1], sys.argv[2], r)
        pids.append(pid)
    if sys.argv[1] == "stopped":
        for r in (0, 2):
            print(r, os.waitstatus_to_exitcode(os.waitpid(pids[r], 0)[1]), flush=True)
        os.kill(pids[1], signal.SIGKILL)
    else:
        for r in range(WORLD):
            print(r, os.waitstatus_to_exitcode(os.waitpid(pids[r], 0)[1]), flush=True)
