# SPDX-License-Identifier: Apache-2.0
"""A step's reductions over slow links, emulated on this machine: every rank in a network namespace of its own, behind a link of
1 or 10 Gb/s (veth pairs on a bridge, token buckets on both directions). Forms: dense, bf16, sparse, and plain top-k that
all-gathers indices and values, as the foil. Needs root and iproute2; what it makes is removed at the end.

sudo .venv/bin/python bench/slow_link.py                              4 and 8 ranks, 1 and 10 Gb/s
sudo .venv/bin/python bench/slow_link.py --ranks 4 --gbits 1 --out docs/results/slow_link.jsonl

Gradients have n16's proportions (16 unequal experts a layer) at a smaller width. sparse: as comm_strategy sparse does it, experts
with little load; hybrid: what the chooser makes of a measured link; sparse-all: everything. bf16: dense with wire_dtype = bf16;
hybrid-bf16: the chooser with bf16 among its forms. The links are checked in the same run by a transfer between two ranks. All
ranks share this machine's cores, so computing counts for more than on a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from datetime import timedelta

FORMS = ("dense", "bf16", "sparse", "hybrid", "hybrid-bf16", "sparse-all", "foil")
PORT = 29400


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8", help="comma-separated")
    parser.add_argument("--gbits", default="1,10", help="of the links, comma-separated")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"of {', '.join(FORMS)}; dense is the peer and always runs")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--k-ratio", type=float, default=0.15)
    parser.add_argument("--chunk-bytes", type=int, default=4 << 20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=600, help="longest that one setting may take")
    parser.add_argument("--out", help="file that results are appended to")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the network -------------------------------------------------------------------------------------------------------------


def ip(*words, check=True):
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")


class Links:
    """Namespaces of the ranks, each with one interface `eth0` at 10.77.0.(rank + 1), around one that holds the bridge."""

    def __init__(self, world: int, gbits: float):
        self.world, self.gbits = world, gbits
        self.switch = f"lf-switch-{os.getpid()}"
        self.names = [f"lf-rank{rank}-{os.getpid()}" for rank in range(world)]

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _shape(self, name: str, interface: str) -> None:
        """A burst lasts a few clock ticks of the kernel: less and the rate is not reached, more and messages pass unshaped."""
        burst = max(int(self.gbits * 1e9 / 8 * 0.003), 1 << 16)
        shape = ["rate", f"{self.gbits}gbit", "burst", str(burst), "latency", "20ms"]
        ip("netns", "exec", name, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *shape)

    def _make(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            ip("netns", "add", name)
            ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            self._shape(name, "eth0")
            self._shape(self.switch, port)

    def __exit__(self, *exc) -> None:
        for name in (*self.names, self.switch):  # interfaces go with their namespace
            ip("netns", "del", name, check=False)


def run_ranks(links: Links, a) -> list:
    """Rank 0's lines."""
    env = dict(os.environ, GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    ranks = []
    for rank, name in enumerate(links.names):
        command = ["ip", "netns", "exec", name, sys.executable, *sys.argv, "--as-rank", f"{rank}/{links.world}"]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=env, stdout=out, text=True))
    try:
        lines = ranks[0].communicate(timeout=a.seconds)[0].splitlines()
        if any(p.wait(timeout=30) for p in ranks):
            sys.exit("a rank failed; its words are above")
        return [json.loads(line) for line in lines if line.startswith("{")]
    finally:
        for p in ranks:
            p.kill()
            p.wait()


# ---- a rank ------------------------------------------------------------------------------------------------------------------


def make_model(layers: int):
    """n16 at a quarter of its width; -> a mixture-of-experts model on a map"""
    from loongforge import accelerate
    from loongforge.models.gr00t_n16 import Gr00tN16, preset

    n16 = preset("n16")
    sizes = tuple(size // 4 for size in n16.expert_sizes)
    model = Gr00tN16(preset("tiny").with_(d_model=n16.d_model // 4, n_layers=layers, n_heads=4, expert_sizes=sizes))
    accelerate(model)
    return model


def make_plain(model):
    """The same parameters as an ordinary model: no groups of experts."""
    from torch import nn

    plain = nn.Module()
    for i, p in enumerate(model.parameters()):
        plain.register_parameter(f"p{i}", nn.Parameter(p.detach().clone()))
    return plain


class Steps:
    """What NexusSync does in a step, without the backward pass: every gradient is there, all are marked, and all are awaited."""

    def __init__(self, model, a, form: str):
        import torch

        from loongforge import _C, NexusSync
        from loongforge.mapping import GRAD

        strategy = "dense" if form == "bf16" else form.split("-")[0]
        options = {"chunk_bytes": a.chunk_bytes, "k_ratio": a.k_ratio, "timeout_s": 300.0, "probe": strategy == "hybrid"}
        options["wire_dtype"] = "bf16" if form.endswith("bf16") else "grad"
        self.sync = NexusSync(model, strategy, transport="torch", **options)
        self.c = _C
        handle = self.sync.map.handle
        classes = [(k, info["count"]) for k, info in enumerate(_C.map_classes(handle)) if info["role_dtype"][GRAD]]
        self.planes = [torch.utils.dlpack.from_dlpack(_C.map_flat(handle, k, 0, count, GRAD)) for k, count in classes if count]

    def fill(self) -> None:
        for plane in self.planes:
            plane.normal_()

    def reduce(self) -> None:
        self.c.nexus_begin(self.sync.handle)
        for b in reversed(self.sync.map.blocks):
            if b.grad is not None:
                self.c.nexus_mark(self.sync.handle, b.index, 0)
        self.c.nexus_finish(self.sync.handle, 0)

    def sent(self) -> int:
        return sum(c["sent_bytes"] for c in self.sync.chunks())

    def total(self) -> int:
        return sum(c["bytes"] for c in self.sync.chunks())

    def forms(self) -> str:
        return ",".join(sorted({c["form"] for c in self.sync.chunks()}))

    def close(self) -> None:
        self.sync.close()


class Foil(Steps):
    """Plain top-k with error feedback: each rank's own indices and values, all-gathered, added in rank order."""

    def __init__(self, model, a):
        import torch

        super().__init__(model, a, "dense")
        self.k_ratio, self.torch = a.k_ratio, torch
        self.parts = [part for plane in self.planes for part in plane.split(a.chunk_bytes // plane.element_size())]
        self.residuals = [torch.zeros_like(part) for part in self.parts]

    def _select(self, part, residual):
        residual += part
        k = max(1, round(self.k_ratio * part.numel()))
        index = residual.abs().topk(k, sorted=False).indices
        values = residual[index]
        residual[index] = 0
        return index.int(), values

    def reduce(self) -> None:
        import torch.distributed as dist

        flying = []
        for part, residual in zip(self.parts, self.residuals):
            mine = self._select(part, residual)
            lists = [[self.torch.empty_like(t) for _ in range(dist.get_world_size())] for t in mine]
            flying.append((part, lists, [dist.all_gather(to, t, async_op=True) for to, t in zip(lists, mine)]))
        for part, (indices, values), works in flying:
            for work in works:
                work.wait()
            part.zero_()
            for index, value in zip(indices, values):
                part.index_add_(0, index.long(), value, alpha=1 / len(indices))

    def sent(self) -> int:
        """That reach a rank through an all-gather: put against the ring's sum by a factor in the table."""
        return sum(8 * max(1, round(self.k_ratio * part.numel())) for part in self.parts)

    def forms(self) -> str:
        return "indices and values"


def measure_link(rank: int) -> float:
    """bits a second, from rank 0 to rank 1"""
    import torch
    import torch.distributed as dist

    data, rates = torch.zeros(32 << 20, dtype=torch.uint8), []
    for _ in range(3):
        dist.barrier()
        began = time.monotonic()
        if rank == 0:
            dist.send(data, 1)
            dist.recv(torch.empty(1), 1)  # it is there
        elif rank == 1:
            dist.recv(data, 0)
            dist.send(torch.zeros(1), 0)
        rates.append(8 * data.numel() / (time.monotonic() - began))
    return statistics.median(rates)


def be_rank(a) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = map(int, a.as_rank.split("/"))
    dist.init_process_group("gloo", f"tcp://10.77.0.1:{PORT}", rank=rank, world_size=world, timeout=timedelta(seconds=a.seconds))
    gbits = measure_link(rank) / 1e9
    torch.manual_seed(rank)
    for form in dict.fromkeys(["dense", *a.forms.split(",")]):
        model = make_model(a.layers)
        if form == "sparse-all":
            model = make_plain(model)
        steps = Foil(model, a) if form == "foil" else Steps(model, a, form)
        seconds = []
        for step in range(-1, a.steps):
            steps.fill()
            dist.barrier()
            began = time.monotonic()
            steps.reduce()
            took = torch.tensor([time.monotonic() - began])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if step >= 0:
                seconds.append(took.item())
        if rank == 0:
            row = {"form": form, "s": statistics.median(seconds), "worst_s": max(seconds), "sent": steps.sent()}
            print(json.dumps({**row, "bytes": steps.total(), "forms": steps.forms(), "link_gbits": gbits}), flush=True)
            for why in sorted({c["why"] for c in steps.sync.chunks()}):
                print(f"{form}: {why}", file=sys.stderr)
        dist.barrier()
        steps.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads and the end of the interpreter


# ---- all of it ---------------------------------------------------------------------------------------------------------------


def tell(report, rows: list, world: int, gbits: float) -> None:
    dense = rows[0]["s"]
    for row in rows[1:]:
        name = f"nexus.{row['form']}_{gbits:g}g_vs_dense"
        more = {k: row[k] for k in ("worst_s", "bytes", "sent", "forms")}
        more.update(
            ranks=world, link_gbits=round(row["link_gbits"], 3), ms=round(1e3 * row["s"], 1), dense_ms=round(1e3 * dense, 1)
        )
        report.add(name, 1 / row["s"], "steps/s", "dense", 1 / dense, **more)
    print(
        f"\n{world} ranks, links of {gbits:g} Gb/s (measured {rows[0]['link_gbits']:.2f}), {rows[0]['bytes'] / 1e6:.1f} MB",
        file=sys.stderr,
    )
    print(f"{'form':12} {'ms':>9} {'worst':>9} {'MB sent':>9} {'vs dense':>9}", file=sys.stderr)
    for row in rows:
        times = f"{1e3 * row['s']:9.1f} {1e3 * row['worst_s']:9.1f}"
        print(f"{row['form']:12} {times} {row['sent'] / 1e6:9.1f} {dense / row['s']:9.2f}", file=sys.stderr)


def main():
    a = arguments()
    if a.as_rank:
        return be_rank(a)
    unknown = set(a.forms.split(",")) - set(FORMS)
    if unknown:
        sys.exit(f"--forms has {', '.join(unknown)}, expected some of {', '.join(FORMS)}")
    if os.geteuid() != 0:
        sys.exit("network namespaces need root; hint: sudo .venv/bin/python bench/slow_link.py")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made is removed
    from report import Report

    report = Report(a.out)
    for gbits in map(float, a.gbits.split(",")):
        for world in map(int, a.ranks.split(",")):
            with Links(world, gbits) as links:
                tell(report, run_ranks(links, a), world, gbits)


if __name__ == "__main__":
    main()
