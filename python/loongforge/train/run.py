# SPDX-License-Identifier: Apache-2.0
"""A training run: set-up, the loop, summary. Every crew takes part."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from contextlib import ExitStack

import torch

from .. import _C, Error
from ..acceleration import accelerate
from ..loader import DataFusionLoader, LMDataset
from ..models.gr00t_n16 import Gr00tN16, preset
from ..nexus import NexusSync
from ..optim import AdamW
from ..sculptor import MemSculptor
from ..streams import device_of, stream_of
from ..vault import CheckpointVault
from .console import Console, StepLog, step_line
from .evaluate import NOT_EVALUATED, Evaluation
from .fault import RunError, Watch
from .monitor import GpuMonitor, Skew, chunk_text, comm_text
from .ranks import Ranks
from .step import FIELDS, RESULTS, LateResults, TrainStep


def learning_rate(options: dict, step: int) -> float:
    """Of the step-th step, counted from 1: linear warm-up, then half a cosine down to min_lr_ratio."""
    warm = options["warmup_steps"]
    if step <= warm:
        return options["lr"] * step / warm
    part = min((step - warm) / max(options["steps"] - warm, 1), 1.0)
    low = options["min_lr_ratio"]
    return options["lr"] * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * part)))


class Run:
    def __init__(self, config: dict, watch: Watch):
        self.config, self.o, self.watch = config, config["train"], watch
        self._name()
        self.dir = os.path.join(self.o["runs_dir"], self.o["name"])
        self.ranks = Ranks()
        watch.joins(self.ranks, self.dir)
        watch.enter("meeting")
        self.ranks.meet(config["nexus"])
        watch.enter("set-up")
        self.stop_signal = 0  # that this rank got
        self.stopped_by = 0  # that a rank got: all ranks agree on it at a step edge
        self._threads()
        self._device()
        self._data()
        self._model()
        self.evaluation = None
        if self.val_dataset:
            self.evaluation = Evaluation(
                self.model, self.val_dataset, self.eval_options, bf16=self.bf16, sync=self.sync, ranks=self.ranks
            )
        self._vault()

    # ---- set-up -----------------------------------------------------------------------------------------------------------

    def _name(self) -> None:
        name = self.o["name"]
        if name in ("", ".", "..", "latest") or "/" in name or "\0" in name:
            raise RunError(f"name is {name!r}, expected a folder name without '/'; 'latest' is the link to the newest run")

    def _threads(self) -> None:
        torch.set_num_threads(self.o["threads"] or len(os.sched_getaffinity(0)))

    def _device(self) -> None:
        """auto: this rank's GPU where there is one and the library has its CUDA side, otherwise the CPU, and why is said."""
        wanted, self.device_note = self.o["device"], ""
        local = self.ranks.local_rank
        if wanted in ("auto", "cuda"):
            wanted = f"cuda:{local}" if wanted == "cuda" or torch.cuda.is_available() else "cpu"
        try:
            _C.device_open(wanted)  # its errors say what is missing
        except Error as error:
            if self.o["device"] != "auto":
                raise
            self.device_note, wanted = f"on the CPU: {error.args[2]}", "cpu"
        self.device = torch.device(wanted)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.clock = _C.clock_open()
        _C.clock_follow(self.clock, device_of(self.device), stream_of(self.device))
        self.monitor, self.skew = GpuMonitor(self.device), Skew(self.ranks.world)
        auto = self.o["dtype"] == "auto"
        self.bf16 = self.o["dtype"] == "bf16" or (auto and self.device.type == "cuda")

    def _data(self) -> None:
        o, r = self.o, self.ranks
        if not o["data"]:
            raise RunError("no data: --data names an LMDB folder; hint: `loongforge pack --scenes 4000 data/scenes` makes one")
        self.model_config = preset(o["preset"])
        parts = r.world * o["micro_steps"]
        if o["batch_size"] % parts:
            raise RunError(f"batch_size is {o['batch_size']}, expected a multiple of {parts} (ranks x micro_steps)")
        self.batch = o["batch_size"] // parts
        self.dataset = LMDataset(o["data"])
        self.val_dataset = LMDataset(o["val_data"]) if o["val_data"] else None
        for name, dataset in (("data", self.dataset), ("val_data", self.val_dataset)):
            if dataset and dataset.info["vocab_size"] > self.model_config.vocab_size:
                raise RunError(
                    f"{name} has token ids up to {dataset.info['vocab_size'] - 1}, preset {o['preset']} takes "
                    f"{self.model_config.vocab_size}; hint: pack it by bytes, or use a larger preset"
                )
        c = self.model_config
        shared = dict(self.config["loader"], image_size=c.image_size, seq_len=c.max_seq_len - c.n_patches, seed=o["seed"])
        self.eval_options = dict(shared, batch_size=self.batch)
        depth = shared.pop("depth")
        for key in ("batch_size", "rank", "world", "blank_images"):
            shared.pop(key)
        self.loader = DataFusionLoader(
            self.dataset, self.batch, prefetch_pipeline_depth=depth, device=self.device, rank=r.rank, world=r.world, **shared
        )

    def _model(self) -> None:
        o = self.o
        c = self.model_config.with_(attention="dense" if o["attention"] == "dense" else "sparse", seed=o["seed"])
        self.model = Gr00tN16(c).to(self.device)
        self.map = accelerate(self.model, dtype=torch.bfloat16 if self.bf16 else None, options=self.config["map"])
        decay = [b.param for b in self.map.blocks if b.param.dim() > 1]
        plain = [b.param for b in self.map.blocks if b.param.dim() <= 1]
        self.optimizer = AdamW(
            [{"params": decay}, {"params": plain, "weight_decay": 0.0}],
            lr=o["lr"],
            betas=(o["beta1"], o["beta2"]),
            eps=o["eps"],
            weight_decay=o["weight_decay"],
            map=self.map,
        )
        every = self.config["nexus"]["every_micro_step"] and o["micro_steps"] > 1  # a single one is the last, and may be captured
        # The model's loss is each rank's share of the global one: TrainStep makes up for a mean.
        nexus = dict(self.config["nexus"], every_micro_step=every, reduce="mean" if every else "sum")
        self.map.passes.on_end(lambda: self.watch.enter("reduction"))  # before NexusSync's own
        self.sync = self.watch.sync = NexusSync(self.model, nexus.pop("comm_strategy"), **nexus)
        if nexus["launch_busy_pct"] > 0:
            if self.monitor.handle is None:
                why = self.monitor.note or f"the model is on {self.device}"
                raise RunError(
                    f"launch_busy_pct is {nexus['launch_busy_pct']:g}, expected 0: nothing tells how busy it is: {why}"
                )
            self.sync.gate(self.monitor.handle)
        self.model.reduce_stats = self.sync.reduce_stats
        self.step_of = TrainStep(
            self.model,
            self.optimizer,
            self.sync,
            micro_steps=o["micro_steps"],
            clip=o["clip"],
            bf16=self.bf16,
            capture=o["capture"],
            clock=self.clock,
            enter=self.watch.enter,
        )
        firsts = [(micro * self.ranks.world + self.ranks.rank) * self.batch for micro in range(o["micro_steps"])]
        self.sample_ids = [torch.arange(first, first + self.batch, device=self.device) for first in firsts]
        sculptor = dict(self.config["sculptor"])
        self.sculptor = MemSculptor(self.model, sculptor.pop("strategy"), **sculptor)

    def _vault(self) -> None:
        self.step, self.tokens, self.resumed_from, self.unlogged = 0, 0, None, []
        saved = os.path.join(self.dir, "checkpoints")
        options = dict(self.config["vault"])
        self.vault = self.watch.vault = CheckpointVault(
            saved, diff_interval=options.pop("diff_interval"), model=self.model, optimizer=self.optimizer, **options
        )
        self.residuals = os.path.join(self.dir, "residuals")
        self.lost: list = []
        if not self.vault.steps():
            return
        if not self.o["resume"]:
            self.vault.close()
            raise RunError(
                f"run '{self.o['name']}' has checkpoints in {saved}; hint: --resume goes on with it, --name starts another"
            )
        self.step = self.resumed_from = self.vault.restore()["step"]
        state = self.vault.blob("run")
        if state is None:
            raise RunError(f"checkpoint {self.step} in {saved} was not written by `loongforge train`: it has no loader state")
        self.tokens, self.unlogged = state["tokens"], state.get("rows", [])
        self.loader.load_state_dict(state["loader"])
        self.sync.seek(self.step)
        self.lost = self.sync.load_residual(self.residuals, self.vault.blob("residual"))

    # ---- the loop ---------------------------------------------------------------------------------------------------------

    def train(self) -> dict:
        o, first = self.o, self.ranks.rank == 0
        self.console = Console(first, o["steps"], self.step)
        self.log = StepLog(os.path.join(self.dir, "log.jsonl"), self.step, self.unlogged, first)
        self.late = LateResults(self.device, len(RESULTS))
        self.rows, self.times, self.last_row, self.run_tokens = [], {}, {}, 0
        self._before = {"comm": 0.0, "decode": 0.0, "write": 0.0}
        self._announce()
        self.began = self.step
        self.tuning = self.sync.tuning
        self.watch.begin()
        with _Signals(self):
            while self.step < o["steps"]:
                with ExitStack() as traced:
                    if self.step == self.began + 1 and first:
                        traced.enter_context(self.sculptor.trace())
                    self._one_step()
                    plan = traced.pop_all()
                if self.step == self.began + 2:
                    self.ranks.from_first(lambda plan=plan: self._keep_trace(plan), "rank 0's plan of memory")
                self._after_step()
                self.watch.enter("step edge")
                if self.step % o["log_every"] == 0 and self.ranks.world > 1:
                    self.skew.take(self.ranks.peers.gather(self.skew.mean(), "how long ranks waited for one another"))
                self.stopped_by = self.ranks.largest(self.stop_signal, "whether a rank got a signal")
                if self.stopped_by:
                    break
        self._collect(0)
        self._log_rows(all_of_them=True)
        self.watch.enter("save")
        if self.step > self.began:
            self._save(force=True)
        self.vault.steps(settled=True)
        if self.tuning:
            self.console.line(chunk_text(self.sync.chunk_size()))
        self.console.close()
        self.log.close()
        if self.step_of.graph.reason and self.device.type == "cuda":
            self.console.line("note: steps ran eagerly: " + self.step_of.graph.reason)
        return self.last_row

    def _keep_trace(self, traced: ExitStack) -> None:
        """Planning takes as long as a model has tensors."""
        traced.close()
        self.sculptor.write_csv(os.path.join(self.dir, "lifetimes.csv"))
        self.console.line(self.sculptor.report())

    def _announce(self) -> None:
        n = sum(p.numel() for p in self.model.parameters())
        resumed = f", resumed from step {self.resumed_from}" if self.resumed_from else ""
        self.console.line(
            f"{self.o['preset']}: {n / 1e6:.1f} M parameters, {len(self.dataset)} samples, {self.ranks.world} rank(s), "
            f"{torch.get_num_threads()} threads{resumed}"
        )
        if self.device_note:
            self.console.line("note: " + self.device_note)
        self.console.line(self.map.describe())
        if self.ranks.world > 1:
            self.console.line(self.sync.describe())
        if self.sync.every_micro_step:
            each, n = self.sync.micro_step_bytes / 1e6, self.o["micro_steps"]
            self.console.line(
                f"reductions in each of {n} micro steps: {n * each:,.1f} MB a step and rank, {each:,.1f} in the last alone"
            )
        if self.monitor.note:
            self.console.line("note: " + self.monitor.note)
        if self.sync.note:
            self.console.line("note: " + self.sync.note)
        if self.config["nexus"]["chunk_tune"] and not self.sync.tuning:
            self.console.line("note: the chunk size is not tuned: " + self.sync.chunk_size()["why"])
        if self.device.type == "cuda" and self.step_of.graph.reason is None:
            self.console.line("the first steps take longer: attention is compiled, memory recorded, the step captured")
        for sentence in self.sync.ignored_environment + self.lost:
            self.console.line("warning: " + sentence)

    def _one_step(self) -> None:
        """Queue one optimizer step over all micro steps and ranks. Its results come later."""
        o, clock = self.o, self.clock
        _C.clock_step_begin(clock)
        step = self.watch.step = self.step + 1
        self.watch.enter("data")
        lr = learning_rate(o, step)
        self.model.train()
        self.model.set_step(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches = [self._next_batch(keep=micro + 1 < o["micro_steps"]) for micro in range(o["micro_steps"])]
        row = {"step": step, "lr": lr}
        self.late.put(row, self._over_ranks(self.step_of(batches, self.sample_ids)))
        self.step = step
        if self.vault.due(step) and step < o["steps"]:
            self.watch.enter("save")
            self._collect(0)  # a step that went wrong is known before it is saved
            self.sync.check()
            _C.clock_part_begin(clock, "io")
            self._save()
            _C.clock_part_end(clock, "io")
        self._hidden_time()
        times = _C.clock_step_end(clock, 0)  # on a GPU of a step before this one, or of none
        if times is not None:
            self.skew.add(times["exposed_s"]["communication"])
            self.times[self.began + 1 + times["step"]] = times

    def _next_batch(self, keep: bool):
        _C.clock_part_begin(self.clock, "data")
        batch = self.loader.next()
        _C.clock_part_end(self.clock, "data")
        tensors = [getattr(batch, name) for name in FIELDS]
        return [t.clone() for t in tensors] if keep else tensors  # the loader takes a batch back when it gives the next

    def _over_ranks(self, results):
        """results: RESULTS of this rank -> the same with loss and tokens of all ranks"""
        if self.ranks.world == 1:
            return results
        return torch.cat([self.sync.reduce_stats(results[:2]), results[2:]])

    def _hidden_time(self) -> None:
        """Time that crews worked beside the step, and what of it the step waited for inside backward."""
        loader, comm = self.loader.stats(), self.sync.stats()["exposed_s"]
        threads = self.config["loader"]["threads"] or len(os.sched_getaffinity(0))
        decode = max(loader["read_s"], loader["decode_s"] / threads, loader["assemble_s"])
        write = (self.vault.stats() or {"write_s": 0.0})["write_s"]
        now = {"comm": comm, "decode": decode, "write": write}
        spent = {k: max(now[k] - self._before[k], 0.0) for k in now}
        self._before = now
        if self.device.type == "cpu":  # elsewhere the clock is told on the device
            _C.clock_add(self.clock, "communication", spent["comm"], spent["comm"])
        _C.clock_add(self.clock, "data", spent["decode"], 0.0)
        _C.clock_add(self.clock, "io", spent["write"], 0.0)

    def _after_step(self) -> None:
        self._collect()
        self._log_rows()
        if self.tuning and not self.sync.tuning:
            self.tuning = False
            self.console.line(chunk_text(self.sync.chunk_size()))
        every = self.o["eval_every"]
        if every and self.step % every == 0 and self.step < self.o["steps"] and self.evaluation:
            self.watch.enter("evaluation")
            _C.clock_pause(self.clock)
            self.console.line(f"step {self.step:>6}  held-out loss {self.evaluation.held_out():.4f}")

    def _collect(self, depth: int | None = None) -> None:
        """Take the results that have come; those of all steps with depth 0."""
        for row, (loss_sum, n_tokens, _, balance, norm) in self.late.take(depth):
            if not math.isfinite(norm):
                self._log_rows(all_of_them=True)
                raise RunError(
                    f"the gradient norm of step {row['step']} is {norm}, expected a finite one; hint: a smaller lr, or look at "
                    "its data"
                )
            tokens = int(n_tokens)
            self.tokens += tokens
            self.run_tokens += tokens
            row.update(loss=loss_sum / max(tokens, 1), balance_loss=balance, grad_norm=norm, tokens=tokens, unix=time.time())
            self.rows.append(row)

    def _log_rows(self, all_of_them: bool = False) -> None:
        """Log steps whose results and times are there, in order. A GPU's last step has no next one that would give its time."""
        told = max(self.times, default=0)
        while self.rows and (all_of_them or self.rows[0]["step"] <= told):
            row = self.rows.pop(0)
            times = self.times.pop(row["step"], None)
            if times is not None:
                wall = times["wall_s"]
                row = {**times, **row, "tokens_per_s": row["tokens"] / wall if wall > 0 else 0.0}
            self._log(row)

    def _log(self, row: dict) -> None:
        self.last_row = row
        self.log.write({k: v for k, v in row.items() if not k.startswith("step_") and k not in ("steps", "bottleneck")})
        self.console.advance(row["step"], f"loss {row['loss']:.3f}")
        if row["step"] % self.o["log_every"] == 0 or row["step"] == self.o["steps"]:
            self.console.line(step_line(row["step"], self.o["steps"], row))

    def _save(self, force: bool = False) -> None:
        """At a step edge. A forced save waits for the writer first, and is left out when this step is saved already."""
        if force and self.step in self.vault.steps(settled=True):
            return
        run = {"tokens": self.tokens, "loader": self.loader.state_dict(), "config": self.config, "rows": self.rows}
        state = {"run": run}
        if self.sync.sparse:  # on the disk before the checkpoint that names it
            state["residual"] = self.sync.save_residual(self.residuals, self.step)
            self.sync.prune_residuals(self.residuals, self.vault.steps(), self.step)
        self.vault.save(self.step, state)

    # ---- the end ----------------------------------------------------------------------------------------------------------

    def summary(self, last_row: dict, evaluated: dict) -> dict:
        s = _C.clock_summary(self.clock)
        steps = max(s["steps"], 1)
        return {
            "steps": self.step,
            "tokens": self.tokens,
            "wall_s": s["wall_s"],
            "tokens_per_s": self.run_tokens / s["wall_s"] if s["wall_s"] > 0 else 0.0,
            "parts": {k: v / steps for k, v in s["exposed_s"].items()},
            "busy": {k: v / steps for k, v in s["busy_s"].items()},
            "overlap_efficiency": s["overlap_efficiency"],
            "bottleneck": s["bottleneck"],
            "step_p50_s": s["step_p50_s"],
            "step_p95_s": s["step_p95_s"],
            "train_loss": last_row.get("loss"),
            **evaluated,
            "resumed_from": self.resumed_from,
            "world": self.ranks.world,
            "memory": self.sculptor.summary,
            "loader": self.loader.stats(),
            "nexus": self.sync.stats(),
            "skew": self.skew.summary(),
            "gpu": self.monitor.summary(),
            "vault": self.vault.stats(),
        }

    def close(self) -> None:
        if self.sync.options["launch_busy_pct"] > 0:
            self.sync.gate(None)
        self.monitor.close()
        self.loader.close()
        self.vault.close()
        self.sync.close()
        self.ranks.close()


class _Signals:
    """SIGTERM and SIGINT end the run at the next step edge, with a checkpoint. A second SIGINT stops at once."""

    def __init__(self, run: Run):
        self.run, self.before = run, {}

    def __enter__(self):
        def note(number, frame):
            if self.run.stop_signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.run.stop_signal = number

        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, note)

    def __exit__(self, *exc):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def result_text(s: dict, where: str) -> str:
    lines = [
        f"{s['steps']} steps, {s['tokens']:,} trained-on tokens, {s['wall_s']:.1f} s in steps, {s['tokens_per_s']:,.0f} token/s",
        f"bottleneck {s['bottleneck']}, overlap efficiency {s['overlap_efficiency']:.2f}; exposed ms a step: "
        + ", ".join(f"{k} {1e3 * v:.1f}" for k, v in s["parts"].items()),
    ]
    if s["train_loss"] is not None:
        lines.append(f"training loss {s['train_loss']:.4f}")
    if s["val_loss"] is not None:
        lines.append(
            f"held-out loss {s['val_loss']:.4f}, with blanked images {s['val_loss_blank_images']:.4f} "
            f"(ratio {s['val_loss'] / s['val_loss_blank_images']:.2f})"
        )
    if s.get("attribute_accuracy") is not None:
        kinds = ", ".join(
            f"{k} {100 * a:.0f} % (chance {100 * c:.0f} %)" for k, (a, c, _) in sorted(s["attribute_by_kind"].items())
        )
        lines.append(
            f"colour and shape words right: {100 * s['attribute_accuracy']:.1f} % of {s['attribute_words']}, "
            f"chance {100 * s['attribute_chance']:.1f} %; {kinds}"
        )
    if s["world"] > 1:
        lines.append(comm_text(s["nexus"], s["skew"]))
    if s["gpu"]:
        mean, most = s["gpu"]["mean"], s["gpu"]["most"]
        lines.append(
            f"GPU: busy {mean.get('sm_pct', 0):.0f} %, memory {mean.get('memory_pct', 0):.0f} %, "
            f"at most {most.get('memory_used_bytes', 0) / 1e9:.1f} GB in use, {s['gpu']['samples']} samples"
        )
    cut, bad = s["loader"]["cut_texts"], s["loader"]["bad_samples"]
    if cut or bad:
        lines.append(f"data: {cut} texts longer than the model takes were cut, {bad} samples could not be used")
    return "\n".join([*lines, f"run folder {where}"])


def run(config: dict) -> int:
    """-> exit code. Of several ranks one that fails leaves the process here: see fault.py."""
    watch = Watch(config)
    try:
        return _run(config, watch)
    except BaseException as error:
        watch.leave(error)
        raise


def _run(config: dict, watch: Watch) -> int:
    job = Run(config, watch)
    last_row = job.train()
    watch.enter("evaluation")
    stopped = job.stopped_by
    evaluated = job.evaluation.whole() if job.evaluation and job.o["eval"] and not stopped else NOT_EVALUATED
    if job.ranks.rank == 0:
        s = job.summary(last_row, evaluated)
        path = os.path.join(job.dir, "summary.json")
        with open(path + ".tmp", "w") as file:
            json.dump(s, file, indent=1)
        os.replace(path + ".tmp", path)
        _link_latest(job)
        print(result_text(s, job.dir), flush=True)
    watch.enter("ending")
    job.close()
    return 128 + stopped if stopped else 0


def _link_latest(job: Run) -> None:
    link = os.path.join(job.o["runs_dir"], "latest")
    if os.path.islink(link) or not os.path.exists(link):
        temporary = f"{link}.{os.getpid()}"
        os.symlink(job.o["name"], temporary)
        os.replace(temporary, link)
