# SPDX-License-Identifier: Apache-2.0
"""A stock torch.optim.AdamW and all it knows, handed over to AdamW on the map, and handed back."""

from __future__ import annotations

import torch

from .mapping import ParameterMap
from .optim import AdamW, refuse_options


def check(stock, model, held: ParameterMap | None) -> None:
    """Refuse, before anything is touched, what could not be taken over. held: the model's map, if it has one."""
    if held is not None and held.optimizer is not None:
        raise RuntimeError("the map has an optimizer already; hint: undo(model), then accelerate(model, optimizer=…)")
    if held is not None and not held.options["optimizer_state"]:
        raise RuntimeError("the map holds weights and gradients only; hint: accelerate the model before NexusSync or the vault")
    if type(stock) is not torch.optim.AdamW:
        raise TypeError(
            f"optimizer is a {type(stock).__name__}, expected a torch.optim.AdamW; hint: leave it out and step it beside the map "
            "or make loongforge.AdamW(map, …)"
        )
    for group in stock.param_groups:
        refuse_options(group)
    known = {id(p) for p in model.parameters()}
    strange = [p for group in stock.param_groups for p in group["params"] if id(p) not in known]
    if strange:
        raise ValueError(
            f"optimizer has {len(strange)} parameters that are not the model's, the first of shape {tuple(strange[0].shape)}; "
            "hint: one optimizer for each model"
        )


class Adopted:
    """What remains of the stock optimizer: its groups, which are shared, so that its schedulers go on working."""

    def __init__(self, stock: torch.optim.AdamW, held: ParameterMap):
        self.stock = stock
        settings = {name: stock.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self.ours = AdamW(stock.param_groups, map=held, **settings)
        self.ours.param_groups = stock.param_groups
        self._move_in()
        stock._opt_called = True  # schedulers ask whether step() came before theirs
        self._hooks = [
            stock.register_step_pre_hook(_refuse_step),
            stock.register_state_dict_pre_hook(_refuse_state),
            stock.register_load_state_dict_pre_hook(_refuse_state),
        ]

    @torch.no_grad()
    def _move_in(self) -> None:
        """Under [map] moments_bf16 moments are rounded to nearest on the way."""
        for p, state in self.stock.state.items():
            own = self.ours.state.get(p)
            if not own or not state:
                continue  # frozen, or never stepped
            for key in ("exp_avg", "exp_avg_sq"):
                own[key].copy_(state[key])
            own["step"] = torch.tensor(float(state["step"]))
        self.stock.state.clear()
        self.ours.rebind()

    def give_back(self) -> None:
        """The stock optimizer goes on with the moments as they are now. Parameters are off the map, in their own dtypes."""
        for hook in self._hooks:
            hook.remove()
        for p, state in self.ours.state.items():
            if not float(state["step"]):
                continue
            moments = {key: state[key].to(p.dtype, copy=True) for key in ("exp_avg", "exp_avg_sq")}
            self.stock.state[p] = {"step": torch.tensor(float(state["step"])), **moments}


def _refuse_step(optimizer, args, kwargs) -> None:
    raise RuntimeError("this AdamW handed over to loongforge.AdamW; hint: step map.optimizer, or undo(model) first")


def _refuse_state(optimizer, *state) -> None:
    raise RuntimeError("this AdamW's state is loongforge.AdamW's now; hint: map.optimizer.state_dict() and load_state_dict()")
