# SPDX-License-Identifier: Apache-2.0
"""NexusSync: gradient ranges of the map reduced over ranks while backward goes on."""

from __future__ import annotations

import atexit
import faulthandler
import os
import weakref
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from . import _C, mpi, nccl, peers, residual
from .copies import StaysBehind
from .mapping import EXP_AVG, EXP_AVG_SQ, GRAD, MASTER, WEIGHT, ParameterMap, current, map_of, refuse_wrapper
from .streams import DTYPES, stream_of
from .torch_transport import TorchTransport

_ONE_PASS = "`with sync.no_sync():` around all backward passes but the last, and no reentrant checkpointing"
_syncs: weakref.WeakSet[NexusSync] = weakref.WeakSet()
_END_WITHIN_S = 10.0


@atexit.register
def _close_all() -> None:
    """While the interpreter and the GPU still work: threads of a handle must not outlive them."""
    for sync in list(_syncs):
        if sync.transport in ("nccl", "mpi") or sync.sparse:  # a worker may call Python
            sync.close()
    if peers.abandoned:  # gloo waits in its destructor for what it cannot finish, by default for half an hour
        faulthandler.dump_traceback_later(_END_WITHIN_S, exit=True)


class _ReduceStats(StaysBehind):
    def __init__(self, sync: NexusSync | None = None):
        self.sync = weakref.ref(sync) if sync is not None else None

    def __call__(self, stats: torch.Tensor) -> torch.Tensor:
        if self.sync is None:
            return stats
        sync = self.sync()
        if sync is None:
            raise RuntimeError("the NexusSync that summed these statistics is gone; hint: keep it as long as the model")
        return sync.sum(stats)


class NexusSync:
    """Reduce a model's gradients over all ranks, in the map's order, hidden behind backward.

    model: accelerated, or an ordinary module, which is then put on a map of weights and gradients.
    comm_strategy: hybrid, dense or sparse; other options of section [nexus] by name (`loongforge config nexus`). sparse: experts
    with little load (an ordinary model: everything) send `k_ratio` of their entries and keep the rest for later steps; what is
    kept is part of the training's state (`save_residual`). wire_dtype="bf16": f32 gradients that are summed densely travel
    rounded to bf16, half the bytes.
    When `loss.backward()` returns, gradients are reduced. `with sync.no_sync():` around all micro steps but the last; or with
    every_micro_step=True none, and each backward reduces, as DDP's do: `micro_step_bytes` move each time, eagerly.
    Without a process group (`torch.distributed` not initialised) there is one rank and nothing moves.
    transport: "nccl" sums by NCCL on a communicator of its own, "torch" through the process group; default: nccl where every rank
    has a GPU of its own, else torch, and `note` says why. The group only helps ranks meet then, so gloo will do.
    "mpi": ranks that mpirun or srun started; torch.distributed is not needed.
    shard_optimizer=True: each rank gets the sums of its share, `loongforge.AdamW` updates that, and the weights go to all ranks
    within `step()`. Gradients stay with the optimizer as in `overlap_update`; before masters or moments are read all ranks call
    `gather_state()`.
    """

    def __init__(
        self,
        model: nn.Module,
        comm_strategy: str = "hybrid",
        *,
        group=None,
        transport: str | None = None,
        priority: int | None = None,
        **options,
    ):
        refuse_wrapper(model, "NexusSync")
        if any(s.map.model is model for s in list(_syncs)):
            raise RuntimeError("the model has a NexusSync already: two would reduce its gradients twice; hint: close() the first")
        self.map: ParameterMap = map_of(model) or ParameterMap(model, optimizer_state=False)
        self.options = dict(options, comm_strategy=comm_strategy)
        if priority is not None:
            self.options["priority"] = priority
        self.group = mpi.peers(self.options) if transport == "mpi" else group
        self.world = peers.world_of(self.group)
        self._steps_before = 0  # steps of the training before this handle
        if self.world > 1:
            peers.of(self.group).timeout_s = _C.options_check("nexus", self.options)["timeout_s"]
        self.map.require_whole("a new NexusSync")
        self.transport, self.note = self._choose(transport)
        self.ignored_environment = check_environment()
        self._gate = None
        self._holders: list = []
        self._open()
        self.broadcast_state()
        if self.world > 1:  # alone there is nothing to move, and a captured step wants no call into the transport
            self.map.passes.on_gradient(self._ready)
            self.map.passes.on_end(self._finish)
            self.map.passes.on_abort(self._abort)
            self.map.sync = self
        self.map.on_replan(self._reopen, guard=self._before_replan)
        self.clock = None  # a step clock that follows the model's device: told how long steps wait, captured ones too
        _syncs.add(self)

    def _choose(self, wanted: str | None) -> tuple:
        """-> name of the transport, and what a user should know about that. Collective."""
        if wanted not in (None, "nccl", "torch", "mpi"):
            raise ValueError(f"transport is {wanted!r}, expected 'nccl', 'torch' or 'mpi'")
        by_mpi = self.world > 1 and isinstance(peers.of(self.group), mpi.MpiPeers)
        if wanted == "torch" and by_mpi:
            raise RuntimeError("transport torch needs torch.distributed, which is not initialised: the ranks are MPI's")
        if self.world == 1:
            return "loopback", None
        if wanted in ("torch", "mpi"):
            return wanted, None
        why = nccl.why_not(self.map.torch_device, self.group, self.options)
        if why and wanted == "nccl":
            raise RuntimeError(f"transport nccl cannot be used: {why}")
        if why and by_mpi:
            return "mpi", None
        if why and self.map.torch_device.type == "cuda":
            return "torch", f"gradients go through torch.distributed: {why}"
        return ("torch" if why else "nccl"), None

    def _open(self) -> None:
        how = self.transport
        if how == "torch":
            how = TorchTransport(self.map.device, self.map.handle, self.group, self.map.torch_device.type == "cpu")
        elif how == "nccl":
            how = nccl.meet(self.group, self.options)
        self.handle = _C.nexus_open(self.map.handle, how, self.options)
        self.tuning = not self.chunk_size()["settled"]
        self._read_schedule()
        self.on_the_way = False  # a backward pass has ended, its reductions have not: gradients are nobody's
        self._claimed = False  # they are the optimizer's, which takes them run by run
        self._overlap = False
        self._begun = False
        self._marked: set = set()
        self._reduced: dict = {}  # block index -> (starts, version) of its gradient when it was reduced

    def _read_schedule(self) -> None:
        """Of each run: how many chunks; the ranges that this rank updates; of those, what it counts towards a norm."""
        chunks = _C.nexus_chunks(self.handle)
        self.sparse = self.world > 1 and any(c["form"] == "sparse" for c in chunks)
        options = _C.options_check("nexus", self.options)
        self.sharded = self.world > 1 and bool(options["shard_optimizer"])
        self.skips = self.world > 1 and bool(options["skip_empty"])
        self.every_micro_step = self.world > 1 and bool(options["every_micro_step"])
        self.micro_step_bytes = sum(c["sent_bytes"] for c in chunks)  # that this rank puts into sums in each backward pass
        self._told = weakref.WeakSet()
        first = self.world == 1 or peers.of(self.group).rank == 0
        self.run_chunks: list = []
        self.runs: list = []
        self.counted: list = []
        for c in chunks:
            if c["run"] == len(self.runs):
                self.run_chunks.append(0)
                self.runs.append([])
                self.counted.append([])
            self.run_chunks[-1] += 1
            self.runs[-1] += [part for part in (c["share"], c["rest"]) if part[2]]
            self.counted[-1] += [part for part in (c["share"], c["rest"])[: 1 + first] if part[2]]
        if not self.sharded:
            self.counted = self.runs

    def _before_replan(self) -> None:
        """What is kept back belongs to places of the map; masters and moments of shares move as a whole."""
        if residual.kept_bytes(self):
            raise RuntimeError(
                "part of the gradients is kept back for later steps, so the map cannot be planned anew; hint: "
                "sync.flush_residual() and one step first"
            )
        self.gather_state()

    def _reopen(self) -> None:
        done = self._steps_before + _C.nexus_stats(self.handle)["steps"]
        self._void_captured()
        self.handle.close()
        self._open()
        if self._gate is not None:
            self.gate(self._gate)
        if self.sparse:
            self.seek(done)

    def _abort(self) -> None:
        """A backward pass raised before its end: the ranks cannot agree any more on what was reduced."""
        raise RuntimeError(
            "a backward pass ended before its gradients were reduced: it failed, so the ranks disagree, or another one ran "
            "inside it (reentrant checkpointing); hint: use_reentrant=False, and after a failure go on from a checkpoint"
        )

    def _ready(self, block) -> None:
        if not self.every_micro_step and self._is_reduced(block):
            raise RuntimeError(
                f"the gradient of {block.name} was reduced already in this step and would be reduced twice; hint: {_ONE_PASS}"
            )
        if not self._begun:
            _C.nexus_begin(self.handle)
            self._begun = True
            if self.skips and self.map.expert_sets:
                self._tell_tokens()
        self._marked.add(block.index)
        _C.nexus_mark(self.handle, block.index, stream_of(self.map.torch_device))

    def _tell_tokens(self) -> None:
        """Which experts had tokens here, in all forwards of this step. The host waits for them, and for the other ranks."""
        self._told = weakref.WeakSet()
        sets = [(s, counts) for s in list(self.map.expert_sets) if (counts := s.take_counts()) is not None]
        numbers = torch.cat([counts for _, counts in sets]).tolist() if sets else []
        tokens = []
        for experts, counts in sets:
            tokens += experts.tokens_by_block(numbers[: counts.numel()])
            numbers = numbers[counts.numel() :]
            self._told.add(experts)
        _C.nexus_present(self.handle, tokens)

    def counts_tokens(self, experts) -> bool:
        """Whether a forward of these experts is to be counted for `skip_empty`."""
        if self.skips and self._begun and experts in self._told:
            raise RuntimeError(
                "experts run forward again inside backward (checkpointing) when ranks have agreed already on which of them are "
                "empty; hint: skip_empty = false"
            )
        return self.skips

    def _is_reduced(self, block) -> bool:
        """The block holds what the last reduction left, perhaps with autograd's next addition: nothing used or zeroed it."""
        before = self._reduced.get(block.index)
        if self.world == 1 or before is None or not self.map.holds_gradient(block):
            return False
        return before[0] == block.starts and block.grad._version - before[1] <= 1

    def _finish(self) -> None:
        """End of backward: post what is left, wait (or leave that to the update), and let every trainable parameter have its
        reduced gradient."""
        if not self._begun:  # what was written is still to be announced
            _C.nexus_begin(self.handle)
        self._begun = False
        for b in self.map.blocks:  # gradients of earlier micro steps only: final, but not announced in this pass
            if b.index in self._marked or not self.map.holds_gradient(b):
                continue
            if not self.every_micro_step and self._is_reduced(b):
                raise RuntimeError(
                    f"this backward pass ended with {b.name} reduced in an earlier one of the same step; hint: {_ONE_PASS}"
                )
            _C.nexus_mark(self.handle, b.index, stream_of(self.map.torch_device))
        self._marked.clear()
        leave = (self._overlap and not self.every_micro_step) or self.sharded
        if leave:
            _C.nexus_flush(self.handle, stream_of(self.map.torch_device))
        else:
            self._wait(_C.nexus_finish)
        for b in self.map.blocks:  # one without a token here got the others' gradient
            if b.grad is not None and not self.map.holds_gradient(b):
                b.has_grad = True
                if b.grad.dtype == b.param.dtype:
                    b.param.grad = b.grad
        if leave:
            self._show(False)
        self._reduced = {b.index: (b.starts, b.grad._version) for b in self.map.blocks if b.grad is not None}

    # ---- an update that begins while gradients are on their way -------------------------------------------------------------

    @contextmanager
    def overlap_update(self):
        """Around forward and backward when the optimizer's step follows at once: backward returns with reductions still on their
        way, and `AdamW.step()` updates each range as it lands. With a norm to clip by, only the norm's parts are made so.

        It is a promise not to touch gradients in between: `.grad` is None until the step. Whatever of the library needs them
        (clip_grad_norm_, zero_grad, another optimizer) waits for all of them first. Results are the same bits."""
        before, self._overlap = self._overlap, True
        try:
            yield
        finally:
            self._overlap = before

    def _show(self, there: bool) -> None:
        self.on_the_way = not there
        for b in self.map.blocks:
            if b.grad is not None and b.grad.dtype == b.param.dtype:
                b.param.grad = b.grad if there else None

    def claim(self) -> NexusSync | None:
        """For an optimizer: gradients are its own from now on, each run once `arrivals` has come to it. None: all are there."""
        if not self.on_the_way:
            self.land()
            return None
        self._show(True)
        self._claimed = True
        return self

    def arrivals(self):
        """-> numbers of runs in order, each when its gradients are there in order of the current stream"""
        for run in range(len(self.runs)):
            self._wait(_C.nexus_take)
            self._claimed = run + 1 < len(self.runs)  # the last take has ended the step, whatever the update then does
            yield run
        self._claimed = False

    def _wait(self, call) -> None:
        """nexus_finish or nexus_take, in order of the current stream; `clock` is told that it waits."""
        stream = stream_of(self.map.torch_device)
        if self.clock is not None:
            _C.clock_mark_begin(self.clock, "communication", stream)
        call(self.handle, stream)
        if self.clock is not None:
            _C.clock_mark_end(self.clock, "communication", stream)

    def land(self) -> None:
        """Wait for all that is on its way, also after an update that raised half-way."""
        if self.on_the_way:
            self._show(True)
        elif not self._claimed:
            return
        self._claimed = False
        self._wait(_C.nexus_finish)
        self._gather(GRAD)

    # ---- the sharded optimizer ----------------------------------------------------------------------------------------------

    def _gather(self, role: int) -> None:
        """Every rank's shares of a plane to all."""
        if self.sharded:
            _C.nexus_gather(self.handle, role, 0, sum(self.run_chunks), stream_of(self.map.torch_device))
            self.gathered()

    def share_weights(self, run: int) -> None:
        """This rank's new weights of a run to the others: posted; `gathered` waits."""
        first = sum(self.run_chunks[:run])
        _C.nexus_gather(self.handle, WEIGHT, first, self.run_chunks[run], stream_of(self.map.torch_device))

    def gathered(self) -> None:
        _C.nexus_gathered(self.handle, stream_of(self.map.torch_device))

    def gather_state(self) -> None:
        """Masters and moments of every rank's shares to all, before they are read. Collective; a vault's `save` does it."""
        if not self.map.stale:
            return
        self.land()
        for role in (MASTER, EXP_AVG, EXP_AVG_SQ):
            self._gather(role)
        self.map.stale = False

    def no_sync(self):
        return self.map.passes.no_sync()

    def broadcast_state(self) -> None:
        """Rank 0's weights, masters and moments to all ranks: done once when NexusSync is made, as DDP does."""
        self.gather_state()
        self.land()
        if self.transport != "nccl":
            if self.world > 1:
                self.map.broadcast(self.group)
            return
        for klass, info in enumerate(_C.map_classes(self.map.handle)):
            for role, dtype in enumerate(info["role_dtype"]):
                if dtype and role != GRAD and info["count"]:
                    flat = torch.utils.dlpack.from_dlpack(_C.map_flat(self.map.handle, klass, 0, info["count"], role))
                    if peers.of(self.group).rank:
                        flat.zero_()
                    self._sum_words(flat.view(torch.int64))  # bits of rank 0 and nothing: exact
        self.map.weights_written(self.map.blocks)

    # ---- the chunk size -----------------------------------------------------------------------------------------------------

    def tune_begin(self) -> None:
        """Before each training step, with `tune_end` after it, for the option chunk_tune: sizes are tried on the first steps,
        and the quickest stays. `StepGraph` does it, a loop of one's own must. `tuning`: there is still something to try."""
        if self.tuning:
            _C.nexus_tune_begin(self.handle, stream_of(self.map.torch_device))

    def tune_end(self, counts: bool = True) -> bool:
        """The step is queued, its update included. counts: its time says something; the same on all ranks. Collective, once a
        size. -> whether the chunk size is another one: what was captured is void, and those of `on_void` were told"""
        if not self.tuning:
            return False
        changed = _C.nexus_tune_end(self.handle, stream_of(self.map.torch_device), counts)
        self.tuning = not self.chunk_size()["settled"]
        if changed:
            self._take_new_schedule()
        return changed

    def retune(self, chunk_bytes: int) -> None:
        """Another chunk size from the next step on. Collective, between steps; ends tuning."""
        self.land()
        _C.nexus_retune(self.handle, chunk_bytes, stream_of(self.map.torch_device))
        self.options.update(chunk_bytes=chunk_bytes, chunk_tune=False)
        self.tuning = False
        self._take_new_schedule()

    def _take_new_schedule(self) -> None:
        self._read_schedule()
        self._void_captured()

    def _void_captured(self) -> None:
        for fn in self._holders:
            fn()

    def on_void(self, fn) -> None:
        """fn() is called when captured steps are void and should be let go: the chunk size has changed, or this closes (NCCL
        does not end a communicator as long as a graph has its kernels)."""
        self._holders.append(fn)

    def chunk_size(self) -> dict:
        """-> chunk_bytes, first_bytes; first_s, chunk_s: a step with either; n_sizes, n_tried, settled; why: nothing is tuned"""
        return _C.nexus_tuning(self.handle)

    # ---- beside the gradients -----------------------------------------------------------------------------------------------

    def _sum_words(self, flat: torch.Tensor) -> None:
        """flat: (n) f64 or i64 on the model's device, summed over ranks in place, in order of the current stream"""
        _C.nexus_reduce(self.handle, flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], stream_of(self.map.torch_device))

    def sum(self, stats: torch.Tensor) -> torch.Tensor:
        """stats: any shape -> its sum over ranks. Outside of backward, in the same order on every rank; may be captured.

        It goes where the gradients go: a second communicator that works beside the first could deadlock with it."""
        if self.world == 1:
            return stats
        self.land()
        wide = torch.float64 if stats.is_floating_point() else torch.int64
        total = stats.detach().to(device=self.map.torch_device, dtype=wide, memory_format=torch.contiguous_format, copy=True)
        self._sum_words(total)
        return total.to(device=stats.device, dtype=stats.dtype)

    def agree(self, good: bool) -> bool:
        """Whether it is good on every rank. The host waits for all of them. Outside of backward and of captures."""
        votes = self.sum(torch.tensor([float(good)], dtype=torch.float64, device=self.map.torch_device)).item()
        self.check()  # after a failure the votes mean nothing
        return votes == self.world

    @property
    def reduce_stats(self):
        """Callable: `sum`, for a model's balance loss. In a copy of the model it sums nothing."""
        return _ReduceStats(self if self.world > 1 else None)

    # ---- health and captures ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what went wrong with any collective so far, also one that nobody waited for: once a step, before a save."""
        _C.nexus_check(self.handle)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may hold a step with its reductions."""
        return self.why_not_capturable is None

    @property
    def why_not_capturable(self) -> str | None:
        if self.sparse:
            return "sparse reductions cannot be captured: whose turn it is to select differs from step to step"
        if self.skips:
            return "skip_empty cannot be captured: which chunks move differs from step to step"
        if self.every_micro_step:
            return "every_micro_step cannot be captured: a captured step has one reduction"
        if self.world > 1 and self.transport != "nccl":
            return "reductions over ranks can be captured by NexusSync's nccl transport only"
        return None

    # ---- what the sparse form keeps back ------------------------------------------------------------------------------------

    def save_residual(self, folder, step: int) -> dict | None:
        """Write what this rank has kept back of its gradients to a file in `folder`. -> a value for the checkpoint of this step
        (`vault.save(step, {"residual": …})`), the same on all ranks; None when nothing is sparse. Collective, between steps."""
        self.land()
        return residual.save(self, folder, step)

    def load_residual(self, folder, saved: dict | None) -> list:
        """Go on with the residuals of a checkpoint, whose value `saved` is, also on another number of ranks. -> sentences on what
        was lost, the same on all ranks. Collective; with `seek` a resumed training is the same bits."""
        return residual.load(self, folder, saved)

    def prune_residuals(self, folder, steps: list, step: int) -> None:
        """Remove files of checkpoints that are not in `steps` any more, before the checkpoint of `step` is saved."""
        residual.prune(self, folder, steps, step)

    def flush_residual(self) -> None:
        """The next step's reductions are dense and take along what was kept back. On all ranks alike."""
        self.land()
        _C.nexus_residual_flush(self.handle)

    def seek(self, steps: int) -> None:
        """So many steps of the training lie behind: whose turn it is to select, and the warm-up, go by it. Collective."""
        self._steps_before = steps - _C.nexus_stats(self.handle)["steps"]
        if self.world > 1:
            _C.nexus_seek(self.handle, steps)

    def settle(self) -> None:
        """Wait until nothing is under way: before a capture."""
        _C.nexus_settle(self.handle)

    def replayed(self) -> None:
        """A graph with a captured step was launched on the current stream: it is counted and watched. Raises as `check` does."""
        if self.world > 1:
            _C.nexus_replayed(self.handle, stream_of(self.map.torch_device))

    def cancel(self) -> None:
        """A capture failed in the middle of a step: forget it."""
        self._begun = False
        self._marked.clear()
        self._reduced = {}
        self.drop()
        self.map.passes.forget()
        _C.nexus_cancel(self.handle)

    def drop(self) -> None:
        """Gradients of a capture that failed are on no way: nobody waits for them."""
        self.on_the_way = self._claimed = False

    def describe(self) -> str:
        """One line: which library moves gradients, and what of it is used."""
        more = f"; the optimizer in shares of {self.world} ranks" if self.sharded else ""
        way = dist.get_backend(self.group) if self.transport == "torch" else self.transport
        if more and way != "nccl":
            more += f" ({way} has no reduce-scatter here: whole chunks are summed, and weights come on top)"
        if self.skips and not self.map.expert_sets:
            more += "; skip_empty skips nothing: the library does not compute these experts"
        return _C.nexus_describe(self.handle) + more

    @staticmethod
    def backward_hook(module, grad_input, grad_output) -> None:
        """For `module.register_full_backward_hook`, as the brief's listing does.

        Gradients are announced by the map itself, so this only makes sure that someone listens."""
        held = current()
        if not any(s.map is held for s in list(_syncs)):
            raise RuntimeError(
                "NexusSync.backward_hook ran, but no NexusSync exists for the current map; hint: NexusSync(model=…) first"
            )

    def chunks(self) -> list:
        return _C.nexus_chunks(self.handle)

    def stats(self) -> dict:
        """Collectives, bytes, exposed seconds, p50/p95/p99 of one collective; bus_bytes_s: bytes * 2 (P - 1) / P over their time,
        as nccl-tests count; exposed_share: of their time, what steps waited. Where several are under way at once each one's
        time counts, so both are lower bounds. chunk_bytes: of now."""
        return dict(_C.nexus_stats(self.handle), chunk_bytes=self.chunk_size()["chunk_bytes"])

    def gate(self, monitor) -> None:
        """Hold runs of collectives back while this monitor's GPU (a handle of `_C.monitor_open`) is busier than the option
        launch_busy_pct, for launch_wait_ms at most. None: no longer; before the monitor is closed."""
        _C.nexus_gate(self.handle, monitor)
        self._gate = monitor

    def recent(self) -> dict:
        """The last collectives, oldest first: {"gradients": the handle's, sums beside the steps too, "control": the group's}."""
        control = peers.of(self.group).recent() if self.world > 1 else []
        return {"gradients": _C.nexus_recent(self.handle), "control": control}

    def close(self) -> None:
        """Never waits for other ranks, also after a failure; in the middle of a step with sparse reductions at most timeout_s."""
        self.drop()
        try:
            self._void_captured()
        finally:
            self.handle.close()
            if self.map.sync is self:
                self.map.sync = None
            self.map.passes.remove(self._ready, self._finish, self._abort)
            self.map.off_replan(self._reopen, guard=self._before_replan)
            _syncs.discard(self)


def check_environment() -> list:
    """Settings under which a failed collective goes unnoticed; each comes back as a sentence, and is logged once by callers."""
    found = []
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name) == "0":
            found.append(f"{name}=0: a failed NCCL collective leaves gradients unreduced without an error; unset it")
    return found


# ---- a call by itself ----------------------------------------------------------------------------------------------------------


def nccl_allreduce(grad: torch.Tensor, chunk_size: int = 16 << 20, group=None) -> torch.Tensor:
    """Sum `grad` over ranks in place, in chunks of `chunk_size` bytes posted together. grad: any shape, contiguous -> grad"""
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected 1 or more bytes")
    if not grad.is_contiguous():
        raise ValueError("grad is not contiguous; hint: grad.contiguous()")
    if peers.torch_world_of(group, "nccl_allreduce") == 1:
        return grad
    flat = grad.view(-1)
    step = max(1, chunk_size // grad.element_size())
    for work in [dist.all_reduce(part, group=group, async_op=True) for part in flat.split(step)]:
        work.wait()
    return grad
