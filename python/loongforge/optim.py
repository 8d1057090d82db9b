# SPDX-License-Identifier: Apache-2.0
"""AdamW over the map: one fused C sweep of the ranges that have a gradient."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from . import _C
from .mapping import EXP_AVG, EXP_AVG_SQ, GRAD, ParameterMap
from .streams import stream_of


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`'s mathematics, state names and `param_groups`; state lives on the map.

    params: a ParameterMap, or parameters / groups all of which lie on `map`. Groups are live: a learning-rate scheduler works
    as with torch. A parameter without a gradient is left alone, as torch leaves one with `.grad` None. Biases and norms
    (fewer than two dimensions) are decayed like the rest, as torch does; put them in a group of their own to spare them.
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
        self.grad_scale = 1.0  # multiplied into the coming step's gradients, before clipping; 1 again after the step
        self._clip = 1.0
        self._sweeps: dict = {}
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._bind_state()
        map.on_replan(self._bind_state)
        map.optimizer = self
        # One step's values: filled on the host, read by the sweep where it runs.
        self._values = torch.zeros(_C.loom_adamw_bytes(), dtype=torch.uint8)
        self._hyper = torch.zeros_like(self._values, device=map.torch_device)
        self._sumsq = torch.zeros(1, dtype=torch.float64, device=map.torch_device)

    def add_param_group(self, param_group) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_hyper"):  # not while torch's constructor adds the first ones
            self._bind_state()

    def _bind_state(self) -> None:
        """Moments are views of the map; step counts are tensors, as torch has them."""
        self._sweeps.clear()
        for group in self.param_groups:
            for p in group["params"]:
                block = self.map.block_of(p)
                if block is None or block.grad is None:
                    raise ValueError(f"a parameter of shape {tuple(p.shape)} is not trainable on the map")
                state = self.state[p]
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
                state["exp_avg"] = self.map.tensor(block, EXP_AVG)
                state["exp_avg_sq"] = self.map.tensor(block, EXP_AVG_SQ)

    def _blocks(self) -> list:
        return [self.map.block_of(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def load_state_dict(self, state_dict) -> None:
        """Values are copied into the map in their own precision; a parameter without state starts anew. Names and shapes are
        torch.optim.AdamW's."""
        super().load_state_dict(
            dict(state_dict, state={})
        )  # groups, checked by torch; its state would come in the weight's dtype
        self.state.clear()
        self._bind_state()
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        for number, block in zip(numbers, self._blocks()):
            given, own = state_dict["state"].get(number, {}), self.state[block.param]
            for key in ("exp_avg", "exp_avg_sq"):
                if key in given:
                    own[key].copy_(given[key])
                else:
                    own[key].zero_()
            own["step"] = torch.as_tensor(given.get("step", 0.0), dtype=torch.float32).clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.map.zero_grad(set_to_none, self._blocks())

    def _ranges(self, blocks):
        key = tuple(b.index for b in blocks)
        if key not in self._sweeps:
            if len(self._sweeps) > 64:
                self._sweeps.clear()
            self._sweeps[key] = _C.map_cover(self.map.handle, key)
        return self._sweeps[key]

    def grad_norm(self) -> float:
        """2-norm of this optimizer's gradients times grad_scale, summed in double precision and a fixed order."""
        own = {id(b) for b in self._blocks()}
        blocks = [b for b in self.map.gradients_present() if id(b) in own]
        if not blocks:
            return 0.0
        _C.loom_sumsq(self.map.handle, stream_of(self.map.torch_device), self._ranges(blocks), GRAD, self._sumsq.data_ptr())
        return self.grad_scale * math.sqrt(self._sumsq.item())

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the coming step's gradients so that their norm is at most max_norm; gradients themselves stay. -> the norm"""
        norm = self.grad_norm()
        self._clip = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan
        return norm

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.map.check()
        self.map.take_edits()
        ready = {id(b.param): b for b in self.map.gradients_present()}
        written = []
        for group in self.param_groups:
            by_step = defaultdict(list)
            for p in group["params"]:
                if id(p) in ready:
                    self.state[p]["step"] += 1
                    by_step[int(self.state[p]["step"])].append(ready[id(p)])
            for step, blocks in by_step.items():
                self._sweep(group, step, blocks)
                written += blocks
        self.grad_scale = self._clip = 1.0
        if written:
            self.map.weights_written(written)
        self.map.consume_gradients(self._blocks())
        return loss

    def _sweep(self, group, step: int, blocks) -> None:
        beta1, beta2 = group["betas"]
        _C.loom_adamw_init(
            self._values.data_ptr(),
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            step,
            self.grad_scale * self._clip,
        )
        self._hyper.copy_(self._values)
        _C.loom_adamw(self.map.handle, stream_of(self.map.torch_device), self._ranges(blocks), self._hyper.data_ptr())
