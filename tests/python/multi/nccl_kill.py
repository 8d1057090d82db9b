# SPDX-License-Identifier: Apache-2.0
"""Run by test_nccl.py where there are two GPUs: pairs of ranks, one of which is killed in the middle of its steps. The other must
end with an error within the deadline, whatever it was doing.

nccl_kill.py [N]: N pairs (default 5); prints a line each. They start together and run one after another.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time

DEADLINE_S, TIMEOUT_S, GRACE_S = 10.0, 5.0, 2.0
#        what the host does, fail, exit codes that are right
KINDS = [
    ("eager", "error", {21}),
    ("replays", "error", {21}),
    ("synchronize", "error", {21}),
    ("deaf", "exit", {75}),
    ("synchronize", "exit", {21, 75}),
]


def child(kind: str, fail: str, folder: str, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from loongforge import AdamW, Error, NexusSync
    from loongforge.graph import StepGraph
    from loongforge.mapping import ParameterMap

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).to(device)
    held = ParameterMap(model)
    sync = NexusSync(model, transport="nccl", timeout_s=TIMEOUT_S, grace_s=GRACE_S, fail=fail, chunk_bytes=1 << 20)
    optimizer = AdamW(held, lr=1e-3)

    def forward_backward(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step = StepGraph(forward_backward, optimizer, enabled=kind != "eager", sync=sync, warmup=2)
    x = torch.randn(64, 1024, device=device)
    for _ in range(5):
        step(x)
    torch.cuda.synchronize()
    assert kind == "eager" or step.n_captured == 1, step.reason
    open(f"{folder}/ready{rank}", "w").close()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
    try:
        while True:
            step(x)
            if kind in ("synchronize", "deaf"):
                torch.cuda.synchronize()
    except Error as error:
        print("told:", error.args[2], flush=True)
        if kind == "deaf":
            time.sleep(3600)
        os._exit(21)


def log(folder, rank):
    with open(f"{folder}/log{rank}") as file:
        return file.read()


def start(kind, fail):
    folder = tempfile.mkdtemp(prefix="nccl_kill_")
    ranks = []
    for rank in range(2):
        with open(f"{folder}/log{rank}", "w") as out:
            command = [sys.executable, __file__, "child", kind, fail, folder, str(rank)]
            ranks.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
    return folder, ranks


def drill(kind, fail, codes, folder, ranks) -> bool:
    began = time.monotonic()
    while not all(os.path.exists(f"{folder}/ready{r}") for r in range(2)):
        if time.monotonic() - began > 120 or any(r.poll() is not None for r in ranks):
            print(f"{kind}, fail = {fail}: did not start\n{log(folder, 0)[-2000:]}\n{log(folder, 1)[-2000:]}", flush=True)
            return False
        time.sleep(0.02)
    open(f"{folder}/go", "w").close()
    time.sleep(random.uniform(0.1, 1.5))
    victim = random.randrange(2)
    ranks[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    survivor = ranks[1 - victim]
    try:
        code = survivor.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        code = "hang"
    took = time.monotonic() - killed
    lines = [line for line in log(folder, 1 - victim).splitlines() if "NCCL" in line or "told" in line]
    good = code in codes and bool(lines)
    print(
        f"{kind}, fail = {fail}: rank {victim} killed, the other ended with {code} after {took:.2f} s "
        f"{'' if good else 'WRONG '}| {(lines or log(folder, 1 - victim).splitlines() or ['no log'])[-1][:230]}",
        flush=True,
    )
    return good


def main() -> int:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    kinds = [KINDS[i % len(KINDS)] for i in range(n)]
    pairs = [start(kind, fail) for kind, fail, _ in kinds]
    try:
        good = [drill(*kind, *pair) for kind, pair in zip(kinds, pairs)]
    finally:
        for _, ranks in pairs:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
    print(f"{sum(good)} of {n} survivors ended with an error within {DEADLINE_S:g} s", flush=True)
    return 0 if all(good) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    sys.exit(main())
