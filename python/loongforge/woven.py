# SPDX-License-Identifier: Apache-2.0
"""GR00T N1.6 with ExpertLoom's layers: the same parameters, arguments and results, a few kernels a layer.

A class swap (`weave`, `unweave`): names and state stay. What belongs to the map (plans, schedule) lives in a holder that does not
travel with a copy of the model; a copy runs the stock layers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from .copies import StaysBehind
from .experts import ExpertSet
from .fused import AddNorm, MixtureAddNorm, head_loss
from .loom import SCHEDULE_BYTES, schedule_bytes
from .models.gr00t_n16 import Gr00tN16
from .models.moe import Routed
from .tree import HookWatch, has_hooks


@dataclass
class MixtureCall:
    """What one layer's mixture needs beside tensors that have gradients."""

    experts: ExpertSet
    begun: tuple  # ExpertSet.begin's
    k: int
    seed: int
    layer: int
    eps: float
    schedule: torch.Tensor
    token: torch.Tensor | None
    valid: torch.Tensor | None


class _Weaving(StaysBehind):
    """Plans of a model's layers: `sets`, None in a copy of the model and while they do not fit the map."""

    def __init__(self, sets=None, device=None, passed_over=()):
        self.sets = self.plans = sets
        self.passed_over, self.told = passed_over, False
        self.hooks = HookWatch(m for _, m in passed_over)
        self.values = b""
        if sets is not None:
            self.schedule = torch.zeros(SCHEDULE_BYTES, dtype=torch.uint8, device=device)
            self.anchor = torch.zeros((), device=device, requires_grad=True)  # makes backward run when only experts are trained

    def reopen(self) -> None:
        """The map moved: plans follow, or layers run unfused until a later move lets them."""
        try:
            for plan in self.plans:
                plan.open()
            self.sets = self.plans
        except NotImplementedError as why:
            self.sets = None
            warnings.warn(f"layers run unfused since the map was planned anew: {why}", RuntimeWarning, stacklevel=2)

    def set(self, step: int, noise: float, temperature: float) -> None:
        """Bring a step's numbers to the device where they differ from those there. Not inside a capture: do it before."""
        values = schedule_bytes(step, noise, temperature)
        if values != self.values:
            if self.schedule.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the router's step changed inside a capture; hint: model.set_step(step) before the step")
            self.schedule.copy_(torch.frombuffer(bytearray(values), dtype=torch.uint8), non_blocking=True)
            self.values = values


def _eps(norm: torch.nn.RMSNorm) -> float:
    return norm.eps if norm.eps is not None else torch.finfo(torch.float32).eps


class WovenGr00tN16(Gr00tN16):
    """Gr00tN16 whose layers are attention and two fused functions: (add, norm) and (mixture, add, norm)."""

    token_loss = staticmethod(head_loss)

    def set_step(self, step: int) -> None:
        super().set_step(step)
        if self._weaving.sets is not None:
            self._schedule(step)

    def train(self, mode: bool = True):
        """As Module.train; noise is for training, also in steps that were captured."""
        super().train(mode)
        if self._weaving.sets is not None:
            self._schedule(self.step)
        return self

    def _schedule(self, step: int) -> torch.Tensor:
        c = self.config
        self._weaving.set(int(step), c.noise_scale(int(step)) if self.training else 0.0, c.tau(int(step)))
        return self._weaving.schedule

    def _has_hooks(self) -> bool:
        """Hooks on what the fused functions pass over would not run: then the modules themselves do."""
        w = self._weaving
        if w.hooks and not w.told:
            w.told = True
            found = next(name for name, m in w.passed_over if has_hooks(m))
            warnings.warn(
                f"{found} has hooks, so its model's layers run unfused; hint: without hooks on layers' parts they are faster",
                RuntimeWarning,
                stacklevel=4,
            )
        return bool(w.hooks)

    def run_layers(self, x, token_index, valid, step, tau):
        """As Gr00tN16.run_layers. x is rounded to the experts' dtype."""
        w, c = self._weaving, self.config
        if w.sets is None or self._has_hooks():
            return super().run_layers(x, token_index, valid, step, tau)
        b, t, d = x.shape
        schedule = self._schedule(step).clone()  # its own: another forward may come before this one's backward
        x = x.reshape(b * t, d).to(w.sets[0].dtype)
        keep = valid.to(torch.uint8).contiguous() if valid is not None else None
        norms = [norm for layer in self.layers for norm in (layer.attention_norm, layer.moe_norm)] + [self.norm]
        x, h = AddNorm.apply(x, None, norms[0].weight, _eps(norms[0]))
        reports = []
        for i, layer in enumerate(self.layers):
            a = layer.attention(h.view(b, t, d)).reshape(b * t, d).to(x.dtype)
            x, h = AddNorm.apply(x, a, norms[2 * i + 1].weight, _eps(norms[2 * i + 1]))
            following = norms[2 * i + 2]
            experts = w.sets[i]
            call = MixtureCall(
                experts,
                experts.begin(),
                c.experts_per_token,
                c.seed,
                layer.moe.layer,
                _eps(following),
                schedule,
                token_index,
                keep,
            )
            x, h, counts, prob_sum = MixtureAddNorm.apply(x, h, layer.moe.router.weight, following.weight, w.anchor, call)
            reports.append(Routed(counts, prob_sum))
        return h.view(b, t, d), reports


def weave_gr00t(model: Gr00tN16, held) -> None:
    """Class swap of a Gr00tN16 on the map `held`. Raises NotImplementedError, which says why, and leaves the model as it is."""
    small = [layer.moe.router.weight for layer in model.layers] + [
        n.weight for layer in model.layers for n in (layer.attention_norm, layer.moe_norm)
    ]
    small.append(model.norm.weight)
    if any(p.dtype != torch.float32 for p in small):
        raise NotImplementedError("norms and routers are not float32")
    sets = [ExpertSet(held, [(e.gate.weight, e.up.weight, e.down.weight) for e in layer.moe.experts]) for layer in model.layers]
    passed_over = [
        (f"layers.{i}.{name}", m)
        for i, layer in enumerate(model.layers)
        for name, m in layer.named_modules()
        if name.partition(".")[0] != "attention"
    ] + [("norm", model.norm)]
    model.__dict__["_weaving"] = _Weaving(sets, held.torch_device, passed_over)
    model.__class__ = WovenGr00tN16
    held.on_replan(model._weaving.reopen)


def unweave_gr00t(model) -> None:
    if type(model) is WovenGr00tN16:
        model.__class__ = Gr00tN16
        model.__dict__.pop("_weaving", None)
