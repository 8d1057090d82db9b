# SPDX-License-Identifier: Apache-2.0
"""What becomes of a run of several CPU ranks when one of them goes: every other rank must end by itself, with an error, in time.

kill_drill.py                        50 kills of one of four ranks, at random moments of set-up, step and save
kill_drill.py --kinds stop,late,raise --trials 3     a rank that is stopped, is late by twice the deadline, or fails by itself

All trials are one run, resumed again and again: each trial goes on from the last checkpoint, which must verify, and at the end
the losses of all steps must be those of a run that nobody disturbed, bit for bit. Ranks are forked from one process that has
imported torch, so a trial takes seconds. The model is the tiny preset, made smaller.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback

import torch

import loongforge.train.run as run_module
from loongforge import _C
from loongforge.models.gr00t_n16 import preset
from loongforge.train.__main__ import main as train_main
from loongforge.train.fault import LOST, Watch

PHASES = ["start", "meeting", "set-up", "data", "forward", "backward", "reduction", "optimizer", "save", "step edge"]
PHASES += ["evaluation", "ending"]
MOMENTS = ["meeting", "set-up", "data", "forward", "backward", "reduction", "optimizer", "save", "step edge"]
BEFORE_STEPS = ("meeting", "set-up")
JITTER_S = {"meeting": 0.3, "set-up": 0.8, "save": 0.03}  # else a few milliseconds
SAVE_EVERY = 2
CELL = struct.Struct("ii")
PLANTED = "planted: this rank's data made no sense"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--kinds", default="kill", help="kill, stop, late, raise: taken in turn")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--deadline", type=float, default=3.0, help="[nexus] timeout_s, and seconds to meet")
    parser.add_argument("--grace", type=float, default=3.0, help="[nexus] grace_s: most seconds from the error to the end")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="phases to choose from")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", help="keep the run there (default: a temporary folder)")
    parser.add_argument("--out", help="file that the figure is appended to")
    return parser.parse_args()


def tiny(_name: str):
    return preset("tiny").with_(d_model=32, n_layers=2, n_heads=2, expert_sizes=tuple(range(16, 48, 2)))


class Board:
    """Where each rank is, in memory that all processes share."""

    def __init__(self, ranks: int):
        self.memory, self.ranks = mmap.mmap(-1, CELL.size * ranks), ranks

    def clear(self) -> None:
        for rank in range(self.ranks):
            CELL.pack_into(self.memory, rank * CELL.size, 0, 0)

    def put(self, rank: int, phase: str, step: int) -> None:
        CELL.pack_into(self.memory, rank * CELL.size, PHASES.index(phase), step)

    def get(self, rank: int) -> tuple:
        phase, step = CELL.unpack_from(self.memory, rank * CELL.size)
        return PHASES[phase], step


class Drill:
    def __init__(self, a, folder: str):
        self.a, self.folder, self.board = a, folder, Board(a.ranks)
        self.random = random.Random(a.seed)
        run_module.preset = tiny
        torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports half of torch: once, for all ranks

    # ---- ranks --------------------------------------------------------------------------------------------------------------

    def start(self, name: str, steps: int, plan: dict | None = None) -> list:
        """Fork all ranks. plan: what goes wrong inside one of them. -> process ids"""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.board.clear()
        pids = []
        for rank in range(self.a.ranks):
            pid = os.fork()
            if pid == 0:
                self._child(name, steps, rank, port, plan)
            pids.append(pid)
        return pids

    def log_of(self, name: str, rank: int) -> str:
        return os.path.join(self.folder, f"{name}.rank{rank}.log")

    def _child(self, name: str, steps: int, rank: int, port: int, plan: dict | None):
        try:
            log = os.open(self.log_of(name, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            a, board = self.a, self.board
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(a.ranks),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                LOONGFORGE_RENDEZVOUS_S=str(round(a.deadline)),
            )
            entered = Watch.enter

            def enter(watch, phase: str) -> None:
                entered(watch, phase)
                board.put(rank, phase, watch.step)
                if plan and plan["victim"] == rank and phase == plan["moment"] and watch.step >= plan["step"]:
                    if plan["kind"] == "late":
                        time.sleep(2 * a.deadline)
                    if plan["kind"] == "raise":
                        raise ValueError(PLANTED)

            Watch.enter = enter
            sys.argv = ["loongforge.train"]
            command = f"--data {self.folder}/scenes --runs_dir {self.folder} --name {name} --steps {steps} --resume --device cpu"
            command += f" --batch_size {2 * a.ranks} --threads 1 --loader.threads 1 --eval false --log_every 1000000 --lr 1e-3"
            command += f" --min_lr_ratio 1 --vault.diff_interval {SAVE_EVERY} --vault.threads 1"
            command += f" --nexus.timeout_s {a.deadline} --nexus.grace_s {a.grace} --nexus.chunk_bytes 64KiB"
            status = train_main(command.split())
        except BaseException:
            traceback.print_exc()
            status = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # ---- one trial ----------------------------------------------------------------------------------------------------------

    def trial(self, kind: str, resumed: int) -> dict:
        """-> what was seen"""
        a, choice = self.a, self.random
        moment = choice.choice(a.moments.split(","))
        while kind not in ("kill", "stop") and moment in BEFORE_STEPS:
            moment = choice.choice(MOMENTS)
        plan = {
            "kind": kind,
            "victim": 0 if moment == "save" else choice.randrange(a.ranks),
            "moment": moment,
            "step": 0 if moment in BEFORE_STEPS else resumed + choice.randint(1, 5),
        }
        jitter = choice.uniform(0, JITTER_S.get(moment, 0.004))
        pids = self.start("drill", 1_000_000, plan)
        seen = dict(plan, wrong=[], ended={}, codes={})
        victim = pids[plan["victim"]]
        if kind in ("kill", "stop"):
            if not self._reach(plan, pids):
                return self._stop(seen, pids, f"rank {plan['victim']} never came to step {plan['step']}, {moment}")
            time.sleep(jitter)
            seen["where"] = self.board.get(plan["victim"])
            os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            began = time.monotonic()
        else:
            if not self._reach(plan, pids):
                return self._stop(seen, pids, f"rank {plan['victim']} never came to step {plan['step']}, {moment}")
            seen["where"], began = self.board.get(plan["victim"]), time.monotonic()
        survivors = [r for r in range(a.ranks) if r != plan["victim"]]
        limit = a.deadline + a.grace
        self._wait(seen, pids, survivors, began, limit)
        for rank in survivors:
            if rank not in seen["ended"]:
                seen["wrong"].append(f"rank {rank} hangs in {' '.join(map(str, self.board.get(rank)))}")
        if kind in ("late", "raise"):
            self._wait(seen, pids, [plan["victim"]], began, 2 * limit + a.deadline)
            want = LOST if kind == "late" else 1
            code = seen["codes"].get(plan["victim"])
            if code != want:
                seen["wrong"].append(f"rank {plan['victim']} itself ended with {code}, expected {want}")
        self._end(pids, seen)
        for rank in survivors:
            self._judge(seen, rank)
        return seen

    def _reach(self, plan: dict, pids: list) -> bool:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            phase, step = self.board.get(plan["victim"])
            if phase == plan["moment"] and step >= plan["step"]:
                return True
            if os.waitpid(pids[plan["victim"]], os.WNOHANG)[0]:
                return False
            time.sleep(0.0003)
        return False

    def _wait(self, seen: dict, pids: list, ranks: list, began: float, limit: float) -> None:
        while time.monotonic() - began < limit and any(r not in seen["ended"] for r in ranks):
            for rank in ranks:
                if rank not in seen["ended"]:
                    pid, status = os.waitpid(pids[rank], os.WNOHANG)
                    if pid:
                        seen["ended"][rank] = time.monotonic() - began
                        seen["codes"][rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.002)

    def _end(self, pids: list, seen: dict) -> None:
        for rank, pid in enumerate(pids):
            if rank not in seen["ended"]:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    pass

    def _stop(self, seen: dict, pids: list, why: str) -> dict:
        self._end(pids, seen)
        logs = "".join(f"\n-- rank {r}\n{self._tail('drill', r)}" for r in range(self.a.ranks))
        seen["wrong"].append(why + logs)
        return seen

    def _tail(self, name: str, rank: int) -> str:
        with open(self.log_of(name, rank)) as file:
            return file.read()[-1500:]

    def _judge(self, seen: dict, rank: int) -> None:
        """A survivor has ended with one error, and a report that says the same."""
        with open(self.log_of("drill", rank)) as file:
            lines = [line for line in file.read().splitlines() if line.startswith("loongforge: ")]
        code = seen["codes"].get(rank)
        if code != LOST:
            seen["wrong"].append(f"rank {rank} ended with {code}, expected {LOST}\n{self._tail('drill', rank)}")
        if len(lines) != 1:
            seen["wrong"].append(f"rank {rank} printed {len(lines)} errors, expected one\n{self._tail('drill', rank)}")
            return
        if seen["kind"] == "raise" and PLANTED in lines[0]:
            seen["told"] = seen.get("told", 0) + 1
        path = os.path.join(self.folder, "drill", f"fault_rank{rank}.json")
        try:
            with open(path) as file:
                report = json.load(file)
            os.remove(path)
        except (OSError, ValueError) as error:
            seen["wrong"].append(f"rank {rank} left no report: {error}")
            return
        if report["error"] not in lines[0] or report["rank"] != rank or not report["phase"]:
            seen["wrong"].append(f"the report of rank {rank} is about something else: {report}")
        named = report["silent"] == [seen["victim"]] or str(seen["victim"]) in report["others"]
        suspected = seen["victim"] == 0 if report["silent"] is None else seen["victim"] in report["silent"]
        seen["named"] = seen.get("named", 0) + (named or suspected)
        training = seen["moment"] not in BEFORE_STEPS
        if training and not (report["step"] >= 1 and report["collectives"]["gradients"] and report["collectives"]["control"]):
            seen["wrong"].append(f"the report of rank {rank} has no step or no collectives")

    # ---- what is on disk ------------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list:
        """Verify all, in a process of its own, for the parent stays fit to fork. -> steps"""
        folder = os.path.join(self.folder, "drill", "checkpoints")
        if not os.path.isdir(folder):
            return []
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                steps = [c["step"] for c in _C.vault_list(folder)]
                if steps:
                    _C.vault_verify(folder)
                os.write(writing, json.dumps(steps).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        os.close(writing)
        with os.fdopen(reading) as file:
            text = file.read()
        _, status = os.waitpid(pid, 0)
        return json.loads(text) if status == 0 else [-1]

    def finish(self, name: str, steps: int) -> list:
        """Undisturbed to the end. -> [(step, loss, gradient norm)]"""
        pids = self.start(name, steps)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            print(f"{name} ended with {codes}\n{self._tail(name, 0)}", flush=True)
        with open(os.path.join(self.folder, name, "log.jsonl")) as file:
            rows = [json.loads(line) for line in file]
        return [(r["step"], r["loss"], r["grad_norm"]) for r in rows]

    def resumed_from(self) -> int | None:
        """What the newest trial said it goes on from; None when it was over before."""
        with open(self.log_of("drill", 0)) as file:
            found = re.search(r"resumed from step (\d+)", file.read())
        return int(found[1]) if found else None


def tell(i: int, n: int, seen: dict, restored: str) -> None:
    phase, step = seen.get("where", (seen["moment"], seen["step"]))
    took = " ".join(f"{r}:{seen['ended'][r]:.2f}s({seen['codes'][r]})" for r in sorted(seen["ended"]))
    print(
        f"{i:3}/{n} {seen['kind']:5} rank {seen['victim']} in {phase:9} of step {step:4} | {took} | "
        f"named by {seen.get('named', 0)} | {restored}" + "".join(f"\n    WRONG {w}" for w in seen["wrong"]),
        flush=True,
    )


def main() -> int:
    a = arguments()
    a.seed = random.SystemRandom().randrange(1 << 31) if a.seed is None else a.seed
    kinds = a.kinds.split(",")
    print(f"seed {a.seed}: {a.trials} trials of {a.ranks} ranks, deadline {a.deadline:g} s, grace {a.grace:g} s", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        drill = Drill(a, a.folder or temporary)
        os.makedirs(drill.folder, exist_ok=True)
        if os.fork() == 0:  # packing starts threads, and a process with threads does not fork well
            _C.pack_scenes(os.path.join(drill.folder, "scenes"), {"scenes": 200})
            os._exit(0)
        os.wait()
        began, last, hangs, wrong, worst, unrestored = time.monotonic(), 0, 0, 0, 0.0, 0
        for i in range(a.trials):
            seen = drill.trial(kinds[i % len(kinds)], last)
            resumed, before = drill.resumed_from(), last
            steps = drill.checkpoints()
            good = -1 not in steps and (max(steps, default=0) >= before) and resumed in (None, before or None)
            unrestored += not good
            last = max(steps, default=0)
            hangs += sum("hangs" in w for w in seen["wrong"])
            wrong += bool(seen["wrong"]) or not good
            worst = max([worst, *(t for r, t in seen["ended"].items() if r != seen["victim"])])
            restored = f"went on from {before}, {len(steps)} checkpoints to {last} verify"
            if not good:
                restored = f"CHECKPOINTS WRONG: went on from {resumed}, expected {before}, now {steps}"
            tell(i + 1, a.trials, seen, restored)
        drilled, whole = drill.finish("drill", last + SAVE_EVERY), drill.finish("whole", last + SAVE_EVERY)
        equal = drilled == whole and len(whole) == last + SAVE_EVERY
        print(
            f"{len(drilled)} steps over {a.trials} trials: losses and norms are {'' if equal else 'NOT '}those of an undisturbed "
            f"run; slowest survivor {worst:.2f} s; {time.monotonic() - began:.0f} s in all",
            flush=True,
        )
    from report import Report

    Report(a.out).add(
        "nexus.kill_drill_hangs",
        hangs,
        "survivors",
        trials=a.trials,
        kinds=a.kinds,
        ranks=a.ranks,
        deadline_s=a.deadline,
        grace_s=a.grace,
        slowest_survivor_s=round(worst, 3),
        wrong_trials=wrong,
        unrestored=unrestored,
        equal_to_undisturbed=equal,
        seed=a.seed,
    )
    return 0 if hangs == 0 and wrong == 0 and equal else 1


if __name__ == "__main__":
    sys.exit(main())
