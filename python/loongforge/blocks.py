# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in other people's models: found by their structure, tried out, and given ExpertLoom's forward.

Each entry of `RECOGNISERS` knows one shape of module. It reads off the module where the experts' weights are, guesses what its
forward computes, and `probe` compares the guess with the module's own forward. What agrees changes class (`weave`, `unweave`):
names, parameters, hooks, buffers and `isinstance` stay. What does not agree stays as it is, and the report says why. A deepcopy
stays woven, a pickle is the stock module.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
import re
import warnings
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from . import _C
from .block_weights import FUSED, MAX_CHOICES, Experts, examine, is_expert_list, linear_names, read
from .copies import StaysBehind
from .experts import ExpertSet
from .fused import mixture
from .loom import Combine, Permute, Routing, at
from .models.moe import MixtureOfExperts
from .probe import Trial, Unfit, small_copy
from .tree import HookWatch, has_hooks

K_NAMES = ("top_k", "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "n_activated_experts", "topk", "k")


# ---- the products ---------------------------------------------------------------------------------------------------------


def _products(rows, routing, experts: Experts):
    """rows: (n k, d) sorted by expert -> (n k, d). An expert without rows has a gradient of zero, not a missing one."""
    counts = routing.count.tolist()
    *parts, unrouted = rows.split([*counts, rows.shape[0] - sum(counts)])
    done = []
    if experts.fused:
        for part, gate_up, down in zip(parts, *(w.unbind(0) for w in experts.fused)):
            gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
            done.append(F.linear(F.silu(gate) * up, down))
    else:
        for part, (gate, up, down) in zip(parts, experts.rows):
            done.append(F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down))
    return torch.cat([y.to(rows.dtype) for y in done] + [torch.zeros_like(unrouted)])


def _moved(x):
    """Rows in the dtype they travel in: bfloat16 where autocast would make that of them at each expert."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
        return x.bfloat16()
    return x if x.dtype == torch.bfloat16 else x.float()


class _Choose(torch.autograd.Function):
    """logits: (n, e) f32 -> the softmax of the k largest (n, k); fills `routing`."""

    @staticmethod
    def forward(ctx, logits, routing):
        logits, r = logits.contiguous(), routing
        _C.loom_route(*at(logits), logits.data_ptr(), 0, 0, r.n, r.e, r.k, 0, 0, 0, r.addresses, 0)
        ctx.routing = r
        return r.weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dweight):
        r, dweight = ctx.routing, dweight.contiguous()
        dlogits = torch.empty(r.n, r.e, dtype=torch.float32, device=dweight.device)
        _C.loom_route_backward(*at(dweight), r.addresses, 0, dweight.data_ptr(), 0, r.n, r.e, r.k, 0, dlogits.data_ptr())
        return dlogits, None


def mix(x, weight, routing: Routing, experts: Experts, plan: ExpertSet | None = None):
    """x: (n, d); weight: (n, k) f32, routing's own with its gradient -> (n, d) of x's dtype. plan: of the same experts."""
    moved = _moved(x)
    if plan is not None and plan.dtype == moved.dtype:
        return mixture(moved, weight, routing, plan).to(x.dtype)
    rows = _products(Permute.apply(moved, routing), routing, experts)
    return Combine.apply(rows, weight, routing).to(x.dtype)


def mix_given(x, ids, weight, experts: Experts, plan: ExpertSet | None = None):
    """x: (..., d); ids: (n, k), outside the experts: nowhere; weight: (n, k) -> as x"""
    weight = weight.float().contiguous()
    routing = Routing.of(ids, weight, experts.count)
    return mix(x.reshape(-1, x.shape[-1]), weight, routing, experts, plan).view(x.shape)


# ---- woven classes --------------------------------------------------------------------------------------------------------


class _Products(StaysBehind):
    """A module's experts on its model's map: `plan`. A copy of the module has none, its products are torch's; nor has one whose
    experts do not fit the map any more."""

    def __init__(self, path: str = "", plan: ExpertSet | None = None):
        self.path, self.plan, self._made = path, plan, plan

    def reopen(self) -> None:
        """The map moved."""
        try:
            self._made.open()
            self.plan = self._made
        except NotImplementedError as why:
            self.plan = None
            warnings.warn(
                f"{self.path}: experts run one by one since the map was planned anew: {why}", RuntimeWarning, stacklevel=2
            )


class Woven:
    """What every woven class has in front of the stock class: the plan, and the rules for copies."""

    kind = ""
    _lf_stock: type
    _lf_plan: NamedTuple
    _lf_products = _Products()
    method = "forward"  # of the stock class, which ours replaces

    def _runs_as_stock(self, x, parts: nn.Module) -> bool:
        """There is no token, or a hook on one of the experts' parts that ours would not run. parts: what holds the experts."""
        if x.numel() == 0:
            return True
        held, watch = self.__dict__.get("_lf_hooks", (None, None))
        if held != id(parts):
            watch = HookWatch(list(parts.modules())[1:])
            self.__dict__["_lf_hooks"] = id(parts), watch
        if not watch:
            return False
        name = next(name for name, m in parts.named_modules() if m is not parts and has_hooks(m))
        warnings.warn(
            f"{type(self).__name__}: experts.{name} has hooks, so the block runs as it did before accelerate",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    def _stock(self, *args, **kwargs):
        return getattr(self._lf_stock, self.method)(self, *args, **kwargs)

    def __deepcopy__(self, memo):
        make, args, state, *_ = super().__reduce_ex__(4)
        twin = memo[id(self)] = make(*args)
        twin.__setstate__(copy.deepcopy(state, memo))
        return twin

    def __reduce_ex__(self, protocol):
        state = {k: v for k, v in super().__reduce_ex__(4)[2].items() if k not in ("_lf_products", "_lf_hooks")}
        return copyreg._reconstructor, (self._lf_stock, object, None), state


_classes: dict = {}


def _forget_forward(module: nn.Module) -> None:
    """Take a copy of the class's own forward off the module: transformers 4 leaves one behind when it records outputs."""
    own = module.__dict__.get("forward")
    if inspect.ismethod(own) and own.__self__ is module and own.__func__ is type(module).forward:
        del module.__dict__["forward"]


def _swap(module: nn.Module, mixin: type, plan: NamedTuple) -> None:
    stock = type(module)
    key = stock, mixin, plan
    if key not in _classes:
        body = {"_lf_stock": stock, "_lf_plan": plan, "__module__": stock.__module__, "__doc__": stock.__doc__}
        _classes[key] = type(f"Woven{stock.__name__}", (mixin, stock), body)
    module.__class__ = _classes[key]


def _configured_k(module) -> int | None:
    for owner in (module, getattr(module, "gate", None), getattr(module, "config", None)):
        for name in K_NAMES:
            if type(k := getattr(owner, name, None)) is int and k > 0:
                return k
    return None


# ---- choices given by the block's own router ------------------------------------------------------------------------------


class GivenPlan(NamedTuple):
    linears: tuple | None
    names: tuple  # of the forward's parameters


def _positional(function) -> tuple:
    """Names of a method's parameters without a default, self aside."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in kinds and p.default is p.empty)


def _bind(names, args, kwargs) -> list:
    given = [*args, *(kwargs.pop(n) for n in names[len(args) :] if n in kwargs)]
    if kwargs or len(given) != len(names):
        raise TypeError(f"expected ({', '.join(names)}), got {len(given)} of them{' and ' if kwargs else ''}{', '.join(kwargs)}")
    return given


class _Given(Woven):
    """One method gets (tokens, ids, weights). Router, shared experts and what they return are the block's."""

    method = ""

    @classmethod
    def fit(cls, module) -> GivenPlan:
        names = _positional(getattr(type(module), cls.method))
        if len(names) != 3:
            raise Unfit(f"its {cls.method} takes ({', '.join(names)}), expected tokens, expert ids and weights")
        k = _configured_k(module)
        plans = [GivenPlan(way, names) for way in examine(cls.holder(module), k)]
        experts = read(cls.holder(module), plans[0].linears)
        g = torch.Generator().manual_seed(22)
        n, e, k = 16, experts.count, min(k or 2, experts.count)
        ids = torch.rand(n, e, generator=g).topk(k).indices
        given = torch.randn(n, experts.width, generator=g), ids, torch.rand(n, k, generator=g)
        trial = Trial(
            small_copy(module, experts.shrunk()),
            lambda twin, plan: _swap(twin, cls, plan),
            lambda twin, *inputs: getattr(twin, cls.method)(*inputs),
            given,
        )
        for plan in plans:
            if trial.agrees(plan, False) and trial.agrees(plan, True):
                return plan
        raise Unfit(f"its experts compute something else than down(silu(gate) * up), weighted and summed{trial.trouble}")

    def describe(self) -> Experts:
        return read(self.holder(self), self._lf_plan.linears)

    def _mix(self, *args, **kwargs):
        x, ids, weight = _bind(self._lf_plan.names, args, dict(kwargs))
        if self._runs_as_stock(x, self.holder(self)):
            return self._stock(*args, **kwargs)
        return mix_given(x, ids, weight, self.describe(), self._lf_products.plan)


class WovenExperts(_Given):
    """The experts as a module of their own: transformers 5."""

    kind = "experts that get their routing"
    method = "forward"
    forward = _Given._mix

    @staticmethod
    def looks_like(module) -> bool:
        if isinstance(module, nn.ModuleList):
            return type(module).forward is not nn.Module.forward and is_expert_list(module)
        return all(module._parameters.get(n) is not None and module._parameters[n].dim() == 3 for n in FUSED)

    @staticmethod
    def holder(module) -> nn.Module:
        return module


class WovenMethod(_Given):
    """A block with a list of experts and a method `moe`: DeepSeek, GLM and dots in transformers 4."""

    kind = "block whose moe() gets the routing"
    method = "moe"
    moe = _Given._mix

    @staticmethod
    def looks_like(module) -> bool:
        return callable(getattr(type(module), "moe", None)) and is_expert_list(module._modules.get("experts"))

    @staticmethod
    def holder(module) -> nn.Module:
        return module.experts


# ---- a block that routes by itself ----------------------------------------------------------------------------------------


class BlockPlan(NamedTuple):
    """What a block's forward does. Values that the block keeps in an attribute are read there, by name, at each call."""

    linears: tuple
    names: tuple  # of the forward's parameter
    experts: str
    router: str  # a child, or "route()": a method of the block, x -> (ids, weights) in any order
    router_called: bool  # as a module; otherwise by F.linear of its weight in f32
    router_f32: bool  # outside the caller's autocast
    k: int | str = 0
    normalise: bool | str = False
    noise: str = ""
    jitter: str = ""
    shared: str = ""
    shared_gate: str = ""
    with_logits: bool = False  # returns (y, logits)


def _uniform(logits):
    return -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))


def _exponential(logits):
    return -torch.empty_like(logits).exponential_().log()


NOISES = {"": None, "gumbel by rand": _uniform, "gumbel by exponential_": _exponential}
SHARED = (("shared_expert", "shared_expert_gate"), ("shared_expert", ""), ("shared_experts", ""))
NORMALISE = "norm_topk_prob"
JITTER = "jitter_noise"


def _expert_lists(module) -> list[str]:
    lists = [n for n, m in module.named_children() if type(m) is nn.ModuleList and len(m) > 1]
    named = [n for n in lists if "expert" in n and "shared" not in n]
    routers = {m.out_features for m in module.children() if isinstance(m, nn.Linear)}
    return named or [n for n in lists if len(module._modules[n]) in routers and is_expert_list(module._modules[n])]


class WovenBlock(Woven):
    """A list of SwiGLU experts and a linear router: softmax, top-k, renormalised or not; gumbel noise in training; jitter and
    shared experts as Mixtral and Qwen have them. So are hand-written mixtures, and those of transformers 4. A block's own method
    route() stands for a router of another kind."""

    kind = "block with a list of experts and a router"
    known = f"softmax, top-k of up to {MAX_CHOICES} and SwiGLU experts"

    @staticmethod
    def looks_like(module) -> bool:
        return not isinstance(module, nn.ModuleList) and bool(_expert_lists(module))

    @classmethod
    def fit(cls, module) -> BlockPlan:
        lists = _expert_lists(module)
        if len(lists) > 1:
            raise Unfit(f"it has several lists of experts: {', '.join(lists)}")
        holder = module._modules[lists[0]]
        ways = examine(holder, _configured_k(module))
        experts = read(holder, ways[0])
        if len(names := _positional(type(module).forward)) != 1:
            raise Unfit(f"its forward takes ({', '.join(names)}), expected one tensor of tokens")
        router = cls._find_router(module, experts.count)
        shared = cls._find_shared(module, {lists[0], router}, router == "route()")
        twin = small_copy(module, experts.shrunk())
        jitter = JITTER if type(getattr(twin, JITTER, None)) is float else ""
        if jitter:
            setattr(twin, jitter, 0.1)  # 0, mostly, and then it would not show
        x = torch.randn(2, 24, experts.width, generator=torch.Generator().manual_seed(23))
        trial = Trial(twin, lambda m, plan: _swap(m, cls, plan), lambda m, x: m(x), [x])
        called, in_f32 = trial.use_of(router) if router != "route()" else (False, False)
        base = BlockPlan(ways[0], names, lists[0], router, called, in_f32, jitter=jitter, shared=shared[0], shared_gate=shared[1])
        base = base._replace(with_logits=len(trial.stock[False][0]) == 2)
        return cls._choose(trial, cls._guesses(module, base, ways))

    @staticmethod
    def _find_router(module, e: int) -> str:
        if callable(getattr(type(module), "route", None)):
            return "route()"
        found = [n for n, m in module.named_children() if isinstance(m, nn.Linear) and m.out_features == e]
        if len(found) != 1:
            what = "no router" if not found else f"several routers ({', '.join(found)})"
            raise Unfit(f"{what}: expected one nn.Linear with {e} outputs beside the experts, or a method route(x)")
        return found[0]

    @staticmethod
    def _find_shared(module, known, open_router: bool) -> tuple[str, str]:
        rest = {n for n, m in module.named_children() if n not in known and next(m.parameters(), None) is not None}
        for pair in (*SHARED, ("", "")):
            names = set(pair) - {""}
            if rest == names or (open_router and rest >= names):
                return pair
        raise Unfit(f"the part of {', '.join(sorted(rest))} in it is unknown")

    @staticmethod
    def _guesses(module, base: BlockPlan, ways):
        """Plans outside training, likeliest first."""
        if base.router == "route()":
            yield from (base._replace(linears=way) for way in ways)
            return
        e = len(module._modules[base.experts])
        ks = [n for n in K_NAMES if type(getattr(module, n, None)) is int and 0 < getattr(module, n) <= min(e, MAX_CHOICES)]
        norms = [NORMALISE] if type(getattr(module, NORMALISE, None)) is bool else []
        configured = _configured_k(module)
        rest = sorted(range(1, min(e, MAX_CHOICES) + 1), key=lambda k: (k != configured, k != 2, k))
        for way in ways:
            for k in [*ks, *rest]:
                for normalise in (*norms, True, False):
                    yield base._replace(linears=way, k=k, normalise=normalise)

    @classmethod
    def _choose(cls, trial: Trial, guesses) -> BlockPlan:
        matched = False
        for guess in guesses:
            if not trial.agrees(guess, False):
                continue
            matched = True
            for noise in NOISES if guess.router != "route()" else ("",):
                if trial.agrees(plan := guess._replace(noise=noise), True):
                    return plan
        if matched:
            raise Unfit(f"in training its forward or its gradient is not that of {cls.known} and gumbel noise{trial.trouble}")
        raise Unfit(f"its forward is not that of {cls.known}{trial.trouble}")

    def describe(self) -> Experts:
        return read(self._modules[self._lf_plan.experts], self._lf_plan.linears)

    def _value(self, name):
        return getattr(self, name) if isinstance(name, str) else name

    def _logits(self, x):
        """x: (n, d) -> (n, e)"""
        router, plan = self._modules[self._lf_plan.router], self._lf_plan
        with torch.autocast(x.device.type, enabled=False) if plan.router_f32 else nullcontext():
            if not plan.router_called:
                return F.linear(x.float(), router.weight.float(), router.bias.float() if router.bias is not None else None)
            return router(x if torch.is_autocast_enabled(x.device.type) else x.to(router.weight.dtype))

    def _route(self, x, experts: Experts):
        """x: (n, d) -> routing, its weights with their gradient (n, k) f32, logits (n, e) or None"""
        plan = self._lf_plan
        if plan.router == "route()":
            one, other = self.route(x)
            ids, weight = (other, one) if one.is_floating_point() else (one, other)
            weight = weight.float().contiguous()
            return Routing.of(ids, weight, experts.count), weight, None
        logits = self._logits(x)
        clean, k = logits.float(), self._value(plan.k)
        noise = NOISES[plan.noise](clean) if plan.noise and self.training else None
        if self._value(plan.normalise):
            routing = Routing(x.shape[0], experts.count, k, x.device, prob=False)
            return routing, _Choose.apply(clean if noise is None else clean + noise, routing), logits
        weight, ids = F.softmax(clean if noise is None else clean + noise, dim=-1).topk(k, dim=-1)
        weight = weight.contiguous()
        return Routing.of(ids, weight, experts.count), weight, logits

    def forward(self, *args, **kwargs):
        plan = self._lf_plan
        (x,) = _bind(plan.names, args, dict(kwargs))
        if self._runs_as_stock(x, self._modules[plan.experts]):
            return self._stock(*args, **kwargs)
        shape = x.shape
        if plan.jitter and self.training and (jitter := getattr(self, plan.jitter)) > 0:
            x = x * torch.empty_like(x).uniform_(1.0 - jitter, 1.0 + jitter)
        x = x.reshape(-1, shape[-1])
        experts = self.describe()
        routing, weight, logits = self._route(x, experts)
        y = mix(x, weight, routing, experts, self._lf_products.plan)
        if plan.shared:
            extra = self._modules[plan.shared](x)
            y = y + (torch.sigmoid(self._modules[plan.shared_gate](x)) * extra if plan.shared_gate else extra)
        return (y.view(shape), logits) if plan.with_logits else y.view(shape)


def expert_lists(model: nn.Module) -> dict[str, tuple[int, tuple | None]]:
    """Paths of the lists of experts below `model` -> how many there are, and the names of their (gate, up, down); None where they
    are not SwiGLU."""
    found = {}
    for path, module in model.named_modules():
        if WovenExperts.looks_like(module):
            holders = {path: module} if isinstance(module, nn.ModuleList) else {}
        else:
            lists = _expert_lists(module) if not isinstance(module, nn.ModuleList) else []
            holders = {f"{path}.{n}" if path else n: module._modules[n] for n in lists}
        linears = module._lf_plan.linears if isinstance(module, Woven) else None
        for name, holder in holders.items():
            found[name] = len(holder), linears or next(iter(linear_names(holder)), None)
    return found


# ---- weaving --------------------------------------------------------------------------------------------------------------

RECOGNISERS: list[type[Woven]] = [WovenExperts, WovenMethod, WovenBlock]


class Found(NamedTuple):
    name: str  # path in the model
    module: str  # name of its stock class
    what: str  # taken: the recogniser's kind; left: why


class Report(NamedTuple):
    """The mixtures of experts of a model: those that run through ExpertLoom, and those that stay as they are."""

    taken: list[Found]
    left: list[Found]

    def lines(self) -> list[str]:
        """Modules of one kind in one line; layers differ by a number."""
        out = []
        for what, found in (("through ExpertLoom", self.taken), ("left as it is", self.left)):
            alike: dict = {}
            for f in found:
                alike.setdefault((re.sub(r"\d+", "*", f.name), f.module, f.what), []).append(f)
            out += [f"{len(fs)} x {name or 'the model'} ({module}) {what}: {why}" for (name, module, why), fs in alike.items()]
        return out


def _signature(module: nn.Module) -> tuple:
    """Equal for modules that differ in their weights' values alone, as those of most layers do: one trial serves all of them."""
    parts = []
    for path, m in module.named_modules():
        shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in m._parameters.items() if p is not None)
        plain = {k: v if isinstance(v, (bool, int, float, str)) else id(v) for k, v in m.__dict__.items() if k[0] != "_"}
        hooks = len(m._forward_hooks) + len(m._forward_pre_hooks)
        parts.append((path, type(m), shapes, tuple(sorted(plain.items())), hooks))
    return tuple(parts)


def _fit(module: nn.Module, mixin: type[Woven], judged: dict):
    """The plan; raises Unfit."""
    _forget_forward(module)
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced on the module itself")
    key = _signature(module)
    if key not in judged:
        try:
            judged[key] = mixin.fit(module)
        except Unfit as why:
            judged[key] = why
    if isinstance(judged[key], Unfit):
        raise judged[key]
    return judged[key]


def _is_like_a_mixture(path: str, module: nn.Module) -> str:
    """Why a module that no recogniser knows looks like a mixture of experts; '' when it does not."""
    last = path.rpartition(".")[2]
    if type(module) is nn.ModuleList and last == "experts" and len(module) > 1:
        return "a list of experts in a module of unknown shape"
    fused = [n for n, p in module._parameters.items() if p is not None and p.dim() == 3]
    if fused and re.search("expert|moe|mixture", f"{type(module).__name__} {last}", re.IGNORECASE):
        return f"weights of several experts in one ({', '.join(fused)}) in a module of unknown shape"
    return ""


def weave(model: nn.Module) -> Report:
    """Turn every mixture of experts below `model` that is known into a woven one, in place. Repeating it is harmless."""
    taken, left, inside, judged = [], [], set(), {}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, MixtureOfExperts):
            taken.append(Found(path, MixtureOfExperts.__name__, "LoongForge's own"))
        elif isinstance(module, Woven):
            taken.append(Found(path, module._lf_stock.__name__, module.kind))
        elif mixin := next((m for m in RECOGNISERS if m.looks_like(module)), None):
            stock = type(module).__name__
            try:
                _swap(module, mixin, _fit(module, mixin, judged))
                taken.append(Found(path, stock, mixin.kind))
            except Unfit as why:
                left.append(Found(path, stock, str(why)))
        elif why := _is_like_a_mixture(path, module):
            left.append(Found(path, type(module).__name__, why))
        else:
            continue
        inside.update(map(id, module.modules()))
    return Report(taken, left)


def unweave(model: nn.Module) -> None:
    """Every woven module below `model` is a stock one again."""
    for module in model.modules():
        if isinstance(module, Woven):
            _forget_forward(module)
            module.__dict__.pop("_lf_products", None)
            module.__dict__.pop("_lf_hooks", None)
            module.__class__ = module._lf_stock


def plan_products(model: nn.Module, held) -> list[str]:
    """Let the products of the woven modules below `model` be the library's, on the map `held`. -> why not, for each where they
    stay torch's: one by one, after a look at the counts."""
    reasons = []
    for path, module in model.named_modules():
        if not isinstance(module, Woven) or "_lf_products" in module.__dict__:
            continue
        experts = module.describe()
        try:
            plan = ExpertSet(held, fused=experts.fused) if experts.fused else ExpertSet(held, experts.rows)
        except NotImplementedError as why:
            reasons.append(f"{path}: {why}")
            continue
        module.__dict__["_lf_products"] = _Products(path, plan)
        held.on_replan(module._lf_products.reopen)
    return reasons
