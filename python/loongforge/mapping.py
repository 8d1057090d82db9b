# SPDX-License-Identifier: Apache-2.0
"""A PyTorch model's parameters on the map: views of one slab, gradients written into it, masters kept beside it.

The rules (docs/internals/python.md has them with reasons):

* A `Parameter` keeps its identity; its `.data` becomes the view of its block, which is a storage of its own.
* A gradient ends in the map's gradient plane. Where it has the parameter's dtype, `.grad` is that view from then on; otherwise
  (bf16 weight, f32 gradient) `.grad` is None after the hook.
* `optimizer.step()` consumes gradients. `zero_grad` in both forms does what it says.
* At a step edge (`check`) every parameter must still be where the map put it.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _C, peers
from .copies import Hook, Owner
from .passes import Passes
from .places import is_kept_in_f32, locate
from .streams import DTYPES, device_of, stream_of
from .tree import TreeWatch, name_disturbance

WEIGHT, GRAD, MASTER, EXP_AVG, EXP_AVG_SQ = range(5)
ROLE_NAMES = ("weight", "grad", "master", "exp_avg", "exp_avg_sq")
KEPT = (torch.float32, torch.bfloat16, torch.float16)
FROZEN, NO_DECAY = 1, 2
BROADCAST_BYTES = 64 << 20

_maps: weakref.WeakSet[ParameterMap] = weakref.WeakSet()


def current() -> ParameterMap:
    """The process's one map, which calls without a model act on."""
    maps = list(_maps)
    if len(maps) != 1:
        found = "there is none" if not maps else f"there are {len(maps)}"
        raise RuntimeError(f"this call acts on the current map, but {found}; hint: accelerate one model first, or pass model=")
    return maps[0]


def map_of(model: nn.Module) -> ParameterMap | None:
    """The map that holds the model's parameters, if any."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    return next((m for m in list(_maps) if m.model is model), None)


class _Block:
    """One owned parameter: its tensors in the map and what has happened to it."""

    __slots__ = ("name", "names", "param", "index", "info", "weight", "grad", "master", "has_grad", "starts", "version", "hook")

    def __init__(self, name, param, index):
        self.name, self.names, self.param, self.index = name, [name], param, index
        self.info = self.weight = self.grad = self.master = None
        self.has_grad = False
        self.starts = 0  # how often the gradient was begun anew, not added to
        self.version = 0
        self.hook = None


class ParameterMap:
    """The map of one model.

    model: its parameters all lie on one device. options: of section [map] (`loongforge config map`).
    dtype: of the weights, default as they are; parameters for which keep_f32(name, param) holds (norms and routers) stay f32.
    Masters start from the values before that conversion, and state dicts go on to carry the original dtype.
    optimizer_state=False holds weights and gradients only, for a crew used alone beside another optimizer; gradients then have
    the weight's dtype, so that any optimizer finds them in `.grad`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: dict | None = None,
        *,
        dtype=None,
        keep_f32=None,
        optimizer_state: bool = True,
        pool_bytes: dict | None = None,
    ):
        if map_of(model) is not None:
            raise RuntimeError("the model is on a map already; hint: loongforge.mapping.map_of(model) finds it")
        refuse_wrapper(model, "a map")
        devices = {p.device for p in model.parameters()}
        if len(devices) != 1:
            raise ValueError(f"the model's parameters are on {sorted(map(str, devices)) or 'no device'}, expected one device")
        self.model = model
        self.torch_device = devices.pop()
        self.options = dict(options or {}, optimizer_state=optimizer_state)
        if not optimizer_state:
            self.options["grad_f32"] = False
        self.pool_bytes = dict(pool_bytes or {})
        self.device = device_of(self.torch_device)
        self._state_dtype = {n: p.dtype for n, p in model.named_parameters(remove_duplicate=False)}
        keep = keep_f32 or is_kept_in_f32
        self._dtype = {
            n: dtype if dtype and not keep(n, p) else p.dtype for n, p in model.named_parameters(remove_duplicate=False)
        }
        self.passes = Passes()
        self._guards: list = []  # called before the map moves; an exception keeps it where it is
        self._replanned: list = []  # called after the map moved
        self.optimizer = None  # the AdamW over this map, once there is one
        self.sync = None  # the NexusSync that reduces these gradients over several ranks
        self.expert_sets: weakref.WeakSet = weakref.WeakSet()  # experts.ExpertSet over these blocks
        self.stale = False  # masters and moments are whole only in this rank's shares (`shard_optimizer`)
        self.adopted = None  # adopt.Adopted: the stock optimizer behind it, if accelerate took one over
        self.woven = None  # blocks.Report: mixtures of experts that accelerate took, and those that it left
        self.handle, self.blocks = self._build()
        self._by_param = {id(b.param): b for b in self.blocks}
        self._watch = TreeWatch(self.model, self.blocks)
        self._hook_module()
        model.__dict__["_loongforge_map"] = Owner(self)
        _maps.add(self)
        _watch_stock_optimizers()

    # ---- building -------------------------------------------------------------------------------------------------------

    def _describe(self):
        """C map of the model as it is now, planned, and its blocks."""
        handle, blocks, owners = _C.map_open(self.options), [], {}
        named = dict(self.model.named_parameters(remove_duplicate=False))
        for name, (layer, expert) in self._places.items():
            param, dtype = named[name], self._dtype[name]
            if dtype not in KEPT:
                raise TypeError(f"{name} has dtype {dtype}, expected float32, bfloat16 or float16")
            owner = owners.get(id(param))
            flags = (0 if param.requires_grad else FROZEN) | (NO_DECAY if param.dim() < 2 else 0)
            index = _C.map_add(
                handle, name, tuple(param.shape), DTYPES[dtype], layer, expert, owner.index if owner else -1, flags
            )
            if owner:
                owner.names.append(name)
            else:
                owners[id(param)] = block = _Block(name, param, index)
                blocks.append(block)
        for pool, size in self.pool_bytes.items():
            _C.map_set_pool_bytes(handle, pool, int(size))
        _C.map_plan(handle)
        order = {name: i for i, name in enumerate(named)}  # optimizers number parameters as the model does
        return handle, sorted(blocks, key=lambda b: order[b.name])

    def _build(self):
        self._places = locate(self.model)
        handle, blocks = self._describe()
        _C.map_allocate(handle, self.device)
        with torch.no_grad():
            for b in blocks:
                self._place(handle, b)
        return handle, blocks

    def _place(self, handle, b: _Block):
        """Move one parameter into its block; masters start from the parameter's value."""
        b.info = _C.map_block(handle, b.index)
        b.weight = torch.utils.dlpack.from_dlpack(_C.map_tensor(handle, b.index, WEIGHT))
        b.weight.copy_(b.param.detach())
        roles = _C.map_classes(handle)[b.info["klass"]]["role_dtype"]
        b.grad = torch.utils.dlpack.from_dlpack(_C.map_tensor(handle, b.index, GRAD)) if roles[GRAD] else None
        b.master = torch.utils.dlpack.from_dlpack(_C.map_tensor(handle, b.index, MASTER)) if roles[MASTER] else None
        if b.master is not None:
            b.master.copy_(b.param.detach())
        b.param.data = b.weight
        b.version = b.param._version
        if b.param.requires_grad:
            b.hook = b.param.register_post_accumulate_grad_hook(Hook(self._gradient_ready))

    def _hook_module(self):
        m = self.model
        self._removers = [
            m.register_state_dict_post_hook(Hook(self._export_state)),
            m.register_load_state_dict_pre_hook(Hook(self._before_load)),
            m.register_load_state_dict_post_hook(Hook(self._after_load)),
            m.register_forward_pre_hook(Hook(self._before_forward)),
        ]
        self._incoming: dict = {}

    def set_pool_size(self, pool: str, size_bytes: float) -> None:
        """Give a pool room (`expert_3`: that expert in every layer) and plan anew; contents and views follow."""
        before = dict(self.pool_bytes)
        self.pool_bytes[pool] = int(size_bytes)
        try:
            self.replan()
        except Exception:
            self.pool_bytes = before
            raise

    def replan(self) -> None:
        """Plan and move everything into a new map: after a pool's size or what is trainable has changed. At a step edge."""
        for guard in list(self._guards):
            guard()
        self.land()
        self.take_edits()
        self._places = locate(self.model)
        for name, p in self.model.named_parameters(remove_duplicate=False):
            self._dtype.setdefault(name, p.dtype)
            self._state_dtype.setdefault(name, p.dtype)
        old_blocks = self.blocks
        values = {}
        for b in old_blocks:
            values[b.name] = {role: self.tensor(b, role) for role in range(5)}
        handle, blocks = self._describe()
        _C.map_allocate(handle, self.device)
        grads = {
            b.name: (
                b.has_grad,
                b.param.grad is not None and b.grad is not None and b.param.grad.data_ptr() == b.grad.data_ptr(),
            )
            for b in old_blocks
        }
        with torch.no_grad():
            for b in blocks:
                before = self._by_param.get(id(b.param))
                if before is not None and before.hook is not None:
                    before.hook.remove()
                self._place(handle, b)
                for role, old in values.get(b.name, {}).items():
                    new = self.tensor(b, role, handle)
                    if old is not None and new is not None:
                        new.copy_(old)
                b.has_grad, was_view = grads.get(b.name, (False, False))
                if was_view:
                    b.param.grad = b.grad
        self.handle, self.blocks = handle, blocks
        self._by_param = {id(b.param): b for b in blocks}
        self._watch = TreeWatch(self.model, self.blocks)
        for told in list(self._replanned):
            told()

    def on_replan(self, fn, guard=None) -> None:
        """fn runs after the map has moved, guard before: an exception of it keeps the map where it is."""
        self._replanned.append(fn)
        if guard is not None:
            self._guards.append(guard)

    def off_replan(self, fn, guard=None) -> None:
        self._replanned = [told for told in self._replanned if told != fn]
        self._guards = [asked for asked in self._guards if asked != guard]

    def tensor(self, block: _Block, role: int, handle=None) -> torch.Tensor | None:
        """View of one role of a block, None where its class has no such role."""
        handle = handle or self.handle
        klass = _C.map_block(handle, block.index)["klass"]
        if not _C.map_classes(handle)[klass]["role_dtype"][role]:
            return None
        return torch.utils.dlpack.from_dlpack(_C.map_tensor(handle, block.index, role))

    def block_of(self, param) -> _Block | None:
        return self._by_param.get(id(param))

    # ---- gradients ------------------------------------------------------------------------------------------------------

    def land(self) -> None:
        """Gradients that NexusSync has left on their way (`overlap_update`) are reduced, and `.grad` is theirs again."""
        if self.sync is not None:
            self.sync.land()

    def require_whole(self, what: str) -> None:
        if self.stale:
            raise RuntimeError(
                f"{what} needs masters and moments, and those of other ranks' shares are behind (shard_optimizer); hint: "
                "sync.gather_state() on every rank first"
            )

    def _before_write(self) -> None:
        if self.sync is not None and self.sync.on_the_way:
            raise RuntimeError(
                "a backward pass writes gradients while the last one's are still on their way to the optimizer; hint: step() or "
                "zero_grad() first, and sync.no_sync() around all micro steps but the last"
            )
        self.land()

    def _gradient_ready(self, param) -> None:
        """Runs when autograd has finished a parameter's gradient of this backward pass."""
        b = self._by_param.get(id(param))
        if b is None or b.grad is None:
            return
        grad = param.grad
        if grad is None:  # the hook also fires where a function returned None: an expert without a token, say
            return
        self._before_write()
        if grad.data_ptr() != b.grad.data_ptr():
            self._take(b, grad)
        self._announce(b)

    def _take(self, b: _Block, grad) -> None:
        """Bring a temporary gradient into the map and drop it."""
        if grad.is_sparse:
            raise TypeError(f"{b.name} has a sparse gradient; hint: sparse=False, the map holds dense ones")
        same, dense = grad.dtype == b.grad.dtype, grad.contiguous()  # `dense` lives until the copy is queued
        # A same-dtype .grad that is not the view holds the whole sum (autograd adds into it); another dtype is added by us.
        _C.loom_add(
            self.device,
            stream_of(self.torch_device),
            b.grad.data_ptr(),
            DTYPES[b.grad.dtype],
            dense.data_ptr(),
            DTYPES[grad.dtype],
            grad.numel(),
            0,
            bool(b.has_grad and not same),
        )
        b.starts += same or not b.has_grad
        b.param.grad = b.grad if same else None

    def begin_write(self, blocks) -> bool:
        """For direct writers (fused backward passes), before they write these blocks' gradients. -> whether they must add"""
        self._before_write()
        held = [self.holds_gradient(b) for b in blocks]
        if not any(held):
            return False
        for b, holds in zip(blocks, held):
            if not holds:
                b.grad.zero_()
            elif b.grad.dtype == b.param.dtype:
                self._adopt_user_gradient(b)
        return True

    def end_write(self, blocks, added: bool, final: bool = True) -> None:
        """These blocks' gradients are queued: `.grad` is their view where it can be, and they are announced; not final: another
        write of this pass follows."""
        for b in blocks:
            b.starts += not added
            if b.grad.dtype == b.param.dtype:
                b.param.grad = b.grad
            self._announce(b, final)

    def _announce(self, b: _Block, final: bool = True) -> None:
        b.has_grad = True
        self.passes.announce(b, final)

    @staticmethod
    def holds_gradient(b: _Block) -> bool:
        """The block has a gradient that no step has used yet."""
        if b.grad is None:
            return False
        return b.param.grad is not None if b.grad.dtype == b.param.dtype else b.has_grad

    def gradients_present(self, land: bool = True) -> list:
        """Blocks whose gradient belongs to the coming optimizer step; land: and is there."""
        if land:
            self.land()
        ready = []
        for b in self.blocks:
            if b.grad is None:
                continue
            if b.grad.dtype == b.param.dtype:
                self._adopt_user_gradient(b)
            if b.has_grad:
                ready.append(b)
        return ready

    def _adopt_user_gradient(self, b: _Block) -> None:
        """`.grad` is the truth where it can be: None means no gradient, another tensor is copied in."""
        grad = b.param.grad
        b.has_grad = grad is not None
        if grad is not None and grad.data_ptr() != b.grad.data_ptr():
            self._take(b, grad)

    def zero_grad(self, set_to_none: bool = True, blocks=None) -> None:
        self.land()
        for b in self.blocks if blocks is None else blocks:
            if set_to_none:
                b.has_grad = False
                b.param.grad = None
                continue
            if b.grad is not None:
                b.grad.zero_()
            if b.param.grad is not None:
                b.param.grad.zero_()  # the view, or a tensor of the user's

    def consume_gradients(self, blocks) -> None:
        """After an optimizer step: gradients of another dtype than the weight start anew (their .grad is None anyway)."""
        for b in blocks:
            if b.grad is not None and b.grad.dtype != b.param.dtype:
                b.has_grad = False

    # ---- step edge --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every parameter is still the model's, in its place and as trainable as planned; otherwise an error names it."""
        if not self._watch.is_undisturbed():
            name_disturbance(self.model, self.blocks)
            self._watch = TreeWatch(self.model, self.blocks)  # modules came or went, no parameter did

    def refresh(self) -> None:
        """Take weights as they are now into their masters. Needed by hand only after edits through `.data`."""
        with torch.no_grad():
            for b in self.blocks:
                if b.master is not None:
                    b.master.copy_(b.weight)
                b.version = b.param._version

    def take_edits(self) -> None:
        """In-place edits (`with torch.no_grad(): p.mul_(…)`) raise a tensor's version: their masters follow."""
        for b in self.blocks:
            if b.param._version != b.version:
                if b.master is not None:
                    with torch.no_grad():
                        b.master.copy_(b.weight)
                b.version = b.param._version

    def weights_written(self, blocks) -> None:
        """The library wrote these weights: saved graphs must notice, and it is no edit of the user's."""
        torch.autograd.graph.increment_version([b.param for b in blocks])
        for b in blocks:
            b.version = b.param._version

    def _before_forward(self, module, args) -> None:
        if module is not self.model:
            return
        ddp = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if ddp is not None and ddp.module is self.model:
            refuse_wrapper(ddp, "the map")

    # ---- state dicts --------------------------------------------------------------------------------------------------------

    def _export_state(self, module, state, prefix, local_metadata) -> None:
        """Parameters that were float32 before they were put on the map leave as float32: their masters."""
        if module is not self.model:
            return
        self.take_edits()
        if any(b.master is not None for b in self.blocks):
            self.require_whole("state_dict")
        for b in self.blocks:
            for name in b.names:
                if b.master is not None and self._state_dtype.get(name) == b.master.dtype and prefix + name in state:
                    state[prefix + name] = b.master

    def _before_load(self, module, state, prefix, *rest) -> None:
        if module is self.model:
            self.take_edits()
            self._incoming = {
                n: state[prefix + n] for b in self.blocks if b.master is not None for n in b.names if prefix + n in state
            }

    def _after_load(self, module, incompatible) -> None:
        if module is not self.model:
            return
        with torch.no_grad():
            for b in self.blocks:
                value = next((self._incoming[n] for n in b.names if n in self._incoming), None)
                if value is not None and value.shape == b.master.shape:
                    b.master.copy_(value)
                b.version = b.param._version
        self._incoming = {}

    # ---- leaving --------------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give every parameter memory of its own again, in its original dtype, and take the hooks off."""
        self.require_whole("giving the model its own memory")
        self.land()
        self.take_edits()
        with torch.no_grad():
            for b in self.blocks:
                held_grad = b.param.grad is not None and b.grad is not None and b.param.grad.data_ptr() == b.grad.data_ptr()
                whole = b.master is not None and self._state_dtype[b.name] == b.master.dtype
                if held_grad:
                    b.param.grad = b.grad.clone()
                if whole:
                    b.param.grad = None  # of another dtype than the weight will have
                b.param.data = (b.master if whole else b.weight).clone()
                if b.hook is not None:
                    b.hook.remove()
        self.model.__dict__.pop("_loongforge_map", None)
        for remover in self._removers:
            remover.remove()
        _maps.discard(self)

    def __deepcopy__(self, memo):
        raise TypeError("a map cannot be copied; hint: copy.deepcopy(model) gives a model outside it")

    def broadcast(self, group=None) -> None:
        """Rank 0's weights, masters and moments to all ranks of the group. Collective."""
        for klass, info in enumerate(_C.map_classes(self.handle)):
            for role, dtype in enumerate(info["role_dtype"]):
                if dtype and role != GRAD:
                    plane = torch.utils.dlpack.from_dlpack(_C.map_flat(self.handle, klass, 0, info["count"], role))
                    for part in plane.split(BROADCAST_BYTES // plane.element_size()):  # each within the deadline
                        peers.of(group).broadcast(part, "first weights")
        self.weights_written(self.blocks)

    # ---- for people -----------------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Device memory of all planes."""
        return _C.map_bytes(self.handle)

    def describe(self) -> str:
        """A few lines: the map's size and groups, and which mixtures of experts run through ExpertLoom."""
        lines = [f"map of {len(self.blocks)} parameters, {self.bytes / 2**20:.1f} MiB on {self.torch_device}"]
        for name, ranges in _C.map_groups(self.handle).items():
            lines.append(f"  group {name:6} {sum(r[2] for r in ranges):>12,} elements in {len(ranges)} ranges")
        lines += [f"  {line}" for line in self.woven.lines()] if self.woven else []
        return "\n".join(lines)


_watching = False


def _watch_stock_optimizers() -> None:
    """An optimizer that reads `.grad` would silently do nothing where gradients are f32 beside bf16 weights: refuse it."""
    global _watching
    if _watching:
        return
    _watching = True

    def look(optimizer, args, kwargs):
        for held in list(_maps):
            if optimizer is held.optimizer or type(optimizer).__module__ == "loongforge.optim":
                continue
            held.land()
            for group in optimizer.param_groups:
                for p in group["params"]:
                    b = held.block_of(p)
                    if b is not None and b.grad is not None and b.grad.dtype != p.dtype and b.has_grad:
                        raise RuntimeError(
                            f"{type(optimizer).__name__} cannot see the gradient of {b.name}: it is f32, the weight is "
                            f"{p.dtype}; hint: loongforge.AdamW, or accelerate(model, options={{'grad_f32': False}})"
                        )

    register_optimizer_step_pre_hook(look)


def refuse_wrapper(model, beside: str) -> None:
    """DDP and FSDP move or reduce gradients themselves: beside ours every gradient would be reduced twice."""
    names = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
    found = names & {c.__name__ for c in type(model).__mro__}
    if found:
        raise RuntimeError(
            f"the model is wrapped in {found.pop()}, which reduces gradients itself; beside {beside} they are reduced twice; "
            "hint: pass the bare module and let NexusSync reduce"
        )
