# SPDX-License-Identifier: Apache-2.0
"""AdamW over the map: one fused C sweep of the ranges that have a gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import _C
from .mapping import EXP_AVG, EXP_AVG_SQ, GRAD, ParameterMap
from .streams import stream_of


class Sweep(NamedTuple):
    """Blocks that share a param group and a step count: one row of hyper-parameters on the device."""

    group: dict
    step: torch.Tensor  # () f32 on the host; the same tensor is `state[p]["step"]` of all of them
    blocks: list
    ranges: list


def refuse_options(group: dict) -> None:
    """Options of torch.optim.AdamW that would change what a step does."""
    for option in ("amsgrad", "maximize", "differentiable"):
        if group.get(option):
            raise ValueError(f"optimizer has {option}=True, which loongforge.AdamW does not do; hint: step it beside the map")


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`'s mathematics, state names and `param_groups`; state lives on the map.

    params: a ParameterMap, or parameters / groups all of which lie on `map`. Groups are live: a learning-rate scheduler works
    as with torch. A parameter without a gradient is left alone, as torch leaves one with `.grad` None, and so is a frozen one.
    Biases and norms (fewer than two dimensions) are decayed like the rest, as torch does; put them in a group of their own to
    spare them.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, *, map: ParameterMap | None = None):
        if isinstance(params, ParameterMap):
            params, map = [b.param for b in params.blocks if b.grad is not None], params
        if map is None:
            raise TypeError("AdamW needs the parameters' map; hint: AdamW(map, …) or AdamW(model.parameters(), map=map)")
        for ok, what, value, expected in (
            (lr >= 0, "lr", lr, "0 or more"),
            (eps >= 0, "eps", eps, "0 or more"),
            (weight_decay >= 0, "weight_decay", weight_decay, "0 or more"),
            (all(0 <= b < 1 for b in betas), "betas", betas, "two numbers in [0, 1)"),
        ):
            if not ok:
                raise ValueError(f"{what} is {value}, expected {expected}")
        self.map = map
        self.grad_scale = 1.0  # a number or a () tensor, multiplied into the coming step's gradients; 1 again after it
        self.norm: torch.Tensor | None = None  # of the last clip_grad_norm_, grad_norm or step after clip_next
        self._max_norm: float | None = None
        self._norm_due = False  # the coming step makes it
        self._arriving = None  # the NexusSync that has gradients of the coming step on their way
        self._covers: dict = {}
        self._cuts: dict = {}  # blocks -> (runs of a schedule, the blocks' ranges in each)
        self._partial: dict = {}
        self.generation = 0  # counts up when groups or step counts were exchanged: a captured step of before is void
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.rebind()
        map.on_replan(self.rebind)
        map.optimizer = self
        self._numbers: dict = {}  # sweeps of a step -> its rows, filled on the host, read by the sweep where it runs
        self._sumsq = torch.zeros(1, dtype=torch.float64, device=map.torch_device)
        self._clipped_norm = torch.zeros(1, dtype=torch.float32, device=map.torch_device)

    def add_param_group(self, param_group) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_numbers"):  # not while torch's constructor adds the first ones
            self.rebind()

    def rebind(self) -> None:
        """Take the state as it is: moments are views of the map; step counts are tensors, as torch has them, shared by blocks
        that count alike. To be called by whoever writes into `state`."""
        self._covers.clear()
        self._cuts.clear()
        self.generation += 1
        shared: dict = {}
        for group in self.param_groups:
            for p in group["params"]:
                block = self.map.block_of(p)
                if block is None:
                    raise ValueError(f"a parameter of shape {tuple(p.shape)} is not on the map")
                if block.grad is None:  # frozen: the map has no moments for it
                    self.state.pop(p, None)
                    continue
                state = self.state[p]
                step = float(state.get("step", 0.0))
                state["step"] = shared.setdefault((id(group), step), torch.tensor(step))
                state["exp_avg"] = self.map.tensor(block, EXP_AVG)
                state["exp_avg_sq"] = self.map.tensor(block, EXP_AVG_SQ)

    def _blocks(self) -> list:
        return [self.map.block_of(p) for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict:
        """torch.optim.AdamW's; step counts are copies, since torch's own `step()` would raise a shared one once a parameter."""
        self.map.require_whole("state_dict")
        found = super().state_dict()
        found["state"] = {key: dict(state, step=state["step"].clone()) for key, state in found["state"].items()}
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict) -> None:
        """Values are copied into the map in its own precision (moments under [map] moments_bf16: rounded to nearest); a parameter
        without state starts anew. Names and shapes are torch.optim.AdamW's."""
        for group in state_dict["param_groups"]:
            refuse_options(group)
        shared = self.param_groups
        super().load_state_dict(
            dict(state_dict, state={})
        )  # groups, checked by torch; its state would come in the weight's dtype
        shared[:], self.param_groups = self.param_groups, shared  # the list may be an adopted optimizer's too
        self.state.clear()
        self.rebind()
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        for number, block in zip(numbers, self._blocks()):
            if block.grad is None:
                continue
            given, own = state_dict["state"].get(number, {}), self.state[block.param]
            for key in ("exp_avg", "exp_avg_sq"):
                if key in given:
                    own[key].copy_(given[key])
                else:
                    own[key].zero_()
            own["step"] = torch.as_tensor(given.get("step", 0.0), dtype=torch.float32)
        self.rebind()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._max_norm, self._norm_due = None, False  # a limit was meant for the gradients that go
        self.map.zero_grad(set_to_none, self._blocks())

    def _ranges(self, blocks):
        key = tuple(b.index for b in blocks)
        if key not in self._covers:
            if len(self._covers) > 64:
                self._covers.clear()
            self._covers[key] = _C.map_cover(self.map.handle, key)
        return self._covers[key]

    @property
    def _stream(self) -> int:
        return stream_of(self.map.torch_device)

    def _cut(self, blocks, counted: bool = False) -> list:
        """The blocks' ranges in each run of the reduction, as they land; without one they are a single run. Of an optimizer in
        shares only this rank's; counted: each element on one rank alone."""
        sync = self.map.sync
        runs = None if sync is None else sync.counted if counted else sync.runs
        key = (counted, *(b.index for b in blocks))
        before, cut = self._cuts.get(key, (None, None))
        if cut is None or before is not runs:
            if len(self._cuts) > 64:
                self._cuts.clear()
            whole = self._ranges(blocks)
            cut = [whole] if runs is None else [_C.ranges_common(run, whole) for run in runs]
            self._cuts[key] = runs, cut
        return cut

    @property
    def _sharing(self):
        """The NexusSync whose shares this rank updates; None: it updates everything."""
        return self.map.sync if self.map.sync is not None and self.map.sync.sharded else None

    def _parts(self, n: int) -> torch.Tensor:
        """(n) f64: a sum of squares of each run. It stays: a captured step adds them up there."""
        if n == 1:
            return self._sumsq
        if n not in self._partial:
            self._partial[n] = torch.zeros(n, dtype=torch.float64, device=self.map.torch_device)
        return self._partial[n]

    def _sum_squares(self, ranges, out: torch.Tensor) -> None:
        _C.loom_sumsq(self.map.handle, self._stream, ranges, GRAD, out.data_ptr())

    def _norm_of(self, blocks, arriving=None) -> torch.Tensor:
        """Run by run, whether they are there already or arriving: the same bits either way."""
        cut = self._cut(blocks, counted=True)
        parts = self._parts(len(cut))
        for run in range(len(cut)) if arriving is None else arriving.arrivals():
            self._sum_squares(cut[run], parts[run])
        return self._add_up(parts)

    def _add_up(self, parts: torch.Tensor) -> torch.Tensor:
        if parts is not self._sumsq:
            torch.sum(parts, 0, keepdim=True, out=self._sumsq)
        if self._sharing is not None:
            self._sumsq.copy_(self._sharing.sum(self._sumsq))
        self.norm = self._sumsq[0].sqrt() * self.grad_scale
        return self.norm

    def grad_norm(self) -> torch.Tensor:
        """() f64 on the map's device: 2-norm of this optimizer's gradients times grad_scale, summed in double precision and a
        fixed order. Nothing waits for it until it is read."""
        own = {id(b) for b in self._blocks()}
        return self._norm_of([b for b in self.map.gradients_present() if id(b) in own])

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the coming step's gradients so that their norm is at most max_norm; gradients themselves stay. -> grad_norm()

        Where the norm is not finite the coming step writes nothing: weights and moments stay as they are."""
        self.clip_next(max_norm)
        self._norm_due = False
        return self.grad_norm()

    def clip_next(self, max_norm: float) -> None:
        """The same, but `step` makes the norm, which is in `norm` then. With several ranks and gradients on their way
        (`NexusSync.overlap_update`) it is made of each range as that lands; without a limit so is the update, but for an
        optimizer in shares. A norm that is not finite then keeps back the update of the range where it showed and of all that
        land later, the same on every rank."""
        if not max_norm >= 0:
            raise ValueError(f"max_norm is {max_norm}, expected 0 (no limit) or more")
        self._max_norm, self._norm_due = max_norm, True

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.map.check()
        self.map.take_edits()
        sweeps = self.plan()
        self.advance(sweeps)
        self.apply(sweeps)
        self.finish(sweeps)
        return loss

    # A step in parts: a captured step plans once, then advances, replays what `apply` queued, and finishes.

    def plan(self) -> list[Sweep]:
        """What the gradients that are present, or on their way, ask for."""
        if self._sharing is None:
            self.map.require_whole("a step of the whole optimizer")
        self._arriving = self.map.sync and self.map.sync.claim()
        ready = {id(b.param): b for b in self.map.gradients_present(land=False)}
        if any(p not in self.state and id(p) in ready for group in self.param_groups for p in group["params"]):
            self.rebind()  # a group was added to the list itself
        return [sweep for group in self.param_groups for sweep in self._plan_group(group, ready)]

    def _plan_group(self, group, ready) -> list[Sweep]:
        counted: dict = {}  # identity of a step count -> everyone who shares it, and who of them takes part
        for p in group["params"]:
            if p not in self.state:  # frozen
                continue
            step = self.state[p]["step"]
            sharing, present = counted.setdefault(id(step), (step, [], []))[1:]
            sharing.append(p)
            if id(p) in ready:
                present.append(ready[id(p)])
        together: dict = {}
        for step, sharing, present in counted.values():
            if not present:
                continue
            if len(present) < len(sharing):  # some stay behind: those who go on count for themselves
                step = step.clone()
            step = together.setdefault(float(step), (step, []))[0]
            for b in present:
                if self.state[b.param]["step"] is not step:
                    self.state[b.param]["step"] = step
                    self.generation += 1
            together[float(step)][1].extend(present)
        return [Sweep(group, step, blocks, self._ranges(blocks)) for step, blocks in together.values()]

    def _rows(self, n_sweeps: int):
        """Numbers of a step with so many sweeps, on the host and on the device. They stay: a captured step reads them there."""
        if n_sweeps not in self._numbers:
            device = self.map.torch_device
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"the captured step has {n_sweeps} sweeps, no step before it had; hint: more warm-up steps")
            values = torch.zeros(n_sweeps, _C.loom_adamw_bytes(), dtype=torch.uint8)
            self._numbers[n_sweeps] = values, torch.zeros_like(values, device=device)
        return self._numbers[n_sweeps]

    def advance(self, sweeps) -> None:
        """Count the step and bring its numbers to the device."""
        values, hyper = self._rows(len(sweeps))
        by_tensor = isinstance(self.grad_scale, torch.Tensor)
        for row, (group, step, _, _) in zip(values, sweeps):
            step += 1
            _C.loom_adamw_init(
                row.data_ptr(),
                group["lr"],
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                int(step),
                1.0 if by_tensor else self.grad_scale,
            )
        # From pageable memory: CUDA has taken the values when the call returns, so the next step may overwrite them.
        hyper.copy_(values, non_blocking=True)
        if by_tensor:
            hyper.view(torch.float32)[:, -1:].mul_(self.grad_scale)

    def apply(self, sweeps, scale: torch.Tensor | None = None) -> None:
        """Queue the device's part; nothing of it depends on the host's values of this step. scale: (), made by work that was
        queued before, multiplied into the gradients beside what `advance` has brought."""
        hyper = self._rows(len(sweeps))[1]
        if scale is not None:
            hyper.view(torch.float32)[:, -1:].mul_(scale)
        arriving, self._arriving = self._arriving, None
        blocks = [b for sweep in sweeps for b in sweep.blocks]
        if arriving is not None and not self._norm_due:
            self._max_norm = None  # of gradients that no step has used: clip_grad_norm_ would have waited for these
        limited = self._max_norm and self._max_norm < math.inf
        shared_norm = self._norm_due and self._sharing is not None  # a rank's own share does not show every nan
        if arriving is not None and not limited and not shared_norm:
            self._update_as_it_lands(arriving, sweeps, blocks)
            return
        if self._norm_due:
            self._norm_of(blocks, arriving)
        if self._max_norm is not None and sweeps:
            self._clip(self._sumsq, self._max_norm, len(sweeps))
        if self._sharing is None:
            for row, sweep in zip(hyper, sweeps):
                _C.loom_adamw(self.map.handle, self._stream, sweep.ranges, row.data_ptr())
            return
        swept = self._by_run(sweeps)
        for run in range(len(self._sharing.runs)):  # a run's weights are on their way while the next one is updated
            self._update_run(swept, run)
        self._sharing.gathered()

    def _by_run(self, sweeps) -> list:
        """-> [(a sweep's row, its ranges in each run)]"""
        return [(row, self._cut(sweep.blocks)) for row, sweep in zip(self._rows(len(sweeps))[1], sweeps)]

    def _update_run(self, swept, run: int) -> None:
        for row, ranges in swept:
            if ranges[run]:
                _C.loom_adamw(self.map.handle, self._stream, ranges[run], row.data_ptr())
        if self._sharing is not None:
            self._sharing.share_weights(run)

    def _update_as_it_lands(self, arriving, sweeps, blocks) -> None:
        """Nothing limits the norm, so each range is updated once it is there, beside the communication of those behind it."""
        cut, swept = self._cut(blocks, counted=True), self._by_run(sweeps)
        parts = self._parts(len(cut))
        for run in arriving.arrivals():
            if self._norm_due:
                self._sum_squares(cut[run], parts[run])
            if self._norm_due and cut[run]:  # not finite: from here on nothing is written
                self._clip(parts[run], 0.0, len(sweeps))
            self._update_run(swept, run)
        if self._sharing is not None:
            self._sharing.gathered()
        if self._norm_due:
            self._add_up(parts)

    def _clip(self, sumsq: torch.Tensor, limit: float, n_sweeps: int) -> None:
        """sumsq: one f64 -> grad_scale of all rows: less where the norm is above the limit, NaN where it is not finite"""
        _C.loom_clip(
            self.map.device,
            self._stream,
            sumsq.data_ptr(),
            limit,
            self._rows(n_sweeps)[1].data_ptr(),
            n_sweeps,
            self._clipped_norm.data_ptr(),
        )

    def finish(self, sweeps) -> None:
        """The step is queued: saved graphs must notice the new weights, gradients are used up."""
        self.forget_options()
        written = [b for sweep in sweeps for b in sweep.blocks]
        if written:
            self.map.weights_written(written)
        self.map.consume_gradients(self._blocks())
        if self._sharing is not None:  # gradients of other shares were never whole
            self.map.stale = True
            self.map.zero_grad(True, self._blocks())

    def forget_options(self) -> None:
        """What was asked of the coming step alone."""
        self.grad_scale, self._max_norm, self._norm_due = 1.0, None, False
