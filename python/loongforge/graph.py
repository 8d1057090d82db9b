# SPDX-License-Identifier: Apache-2.0
"""A whole optimizer step as one CUDA graph: captured once a batch shape, replayed with one launch.

Rules and reasons: docs/internals/graph.md.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from . import _C
from .optim import AdamW
from .streams import stream_of


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    slots: list  # the batch's tensors at the addresses that were captured
    out: object  # what forward_backward returned: tensors that every replay overwrites
    norm: torch.Tensor  # without `scale` and the caller's grad_scale
    sweeps: list
    scale: float  # that forward_backward set as the optimizer's grad_scale


class StepGraph:
    """One training step: zero_grad, forward and backward, clipping, optimizer.

    forward_backward(*batch): runs the model and `backward()`, returns tensors (a tensor, or a tuple, list, dict or object of
    them). It must not read a value of the device (`.item()`, `.tolist()`, printing), and what changes from step to step must
    be a tensor of the batch or in memory of the device.
    batch: tensors, or values that are the same whenever the shapes are. Each new set of shapes makes `warmup` eager steps, all
    of them real steps, and one capture; at most `max_shapes` are captured, further ones stay eager.
    sync: the model's NexusSync, needed with several ranks. All ranks must then give the same sequence of shapes; they capture
    together, or stay eager together. With its option chunk_tune the first steps try chunk sizes, each captured anew.
    overlap_update: with several ranks the update of a range begins when its reduction is there, not when all are;
    forward_backward promises not to look at gradients after `backward()`, where they are None (`NexusSync.overlap_update`).
    clip: largest norm of the gradient, 0 for none. clock: a step clock (`_C.clock_open`) that is told what is computing and what
    is the optimizer.

    What a captured step returns is overwritten by the next one. Off CUDA, with `enabled=False`, and when a capture fails the
    step is eager: `reason` says why, and one warning does.
    """

    def __init__(
        self,
        forward_backward: Callable,
        optimizer: AdamW,
        *,
        clip: float = 0.0,
        warmup: int = 3,
        max_shapes: int = 8,
        enabled: bool = True,
        clock=None,
        sync=None,
        overlap_update: bool = False,
    ):
        self.forward_backward, self.optimizer, self.clip = forward_backward, optimizer, clip
        self.warmup, self.max_shapes, self.clock = warmup, max_shapes, clock
        self.sync = sync if sync is not None and sync.world > 1 else None
        self._overlapped = self.sync.overlap_update if overlap_update and self.sync is not None else nullcontext
        self.device = optimizer.map.torch_device
        if self.sync is not None and self.device.type == "cuda":
            self.sync.clock = clock
        self.reason = None
        if not enabled:
            self.reason = "switched off"
        elif self.device.type != "cuda":
            self.reason = f"CUDA graphs need CUDA, the model is on {self.device}"
        elif self.sync is not None and not self.sync.capturable:
            self.reason = self.sync.why_not_capturable
        self.norm: torch.Tensor | None = None  # () f64: of the last step's gradient, before clipping
        self._captured: dict = {}
        self._seen: dict = {}
        self._generation = optimizer.generation
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._stream = self._pool = None
        self._steady = True  # the last step was as later ones of its shape will be
        optimizer.map.on_replan(self.forget)
        if self.sync is not None:
            self.sync.on_void(self.forget)

    @property
    def n_captured(self) -> int:
        return len(self._captured)

    def forget(self) -> None:
        """Drop what was captured: addresses have moved, or a form changed. The next steps warm up and capture anew."""
        self._captured.clear()
        self._seen.clear()
        self._pool = None

    def __call__(self, *batch):
        if self.sync is None or not self.sync.tuning:
            return self._step(batch)
        self.sync.tune_begin()
        out = self._step(batch)
        self.sync.tune_end(self._steady)
        return out

    def _step(self, batch):
        self._steady = True
        if self.reason is not None:
            return self._eager(batch)
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != self._sizes:  # a group was added to the list itself
            self._sizes = sizes
            self.optimizer.rebind()
        if self._generation != self.optimizer.generation:  # other groups, or step counts of a checkpoint or split by a shape
            self._generation = self.optimizer.generation
            self.forget()
        key = (self.clip, *((b.shape, b.stride(), b.dtype) if isinstance(b, torch.Tensor) else b for b in batch))
        captured = self._captured.get(key)
        if captured is None:
            seen = self._seen[key] = self._seen.get(key, 0) + 1
            if seen <= self.warmup or len(self._captured) >= self.max_shapes:
                self._steady = seen > self.warmup
                return self._aside(batch)
            self._steady = False
            captured = self._capture(batch)
            if captured is None:
                return self._eager(batch)
            self._captured[key] = captured
        return self._replay(captured, batch)

    # ---- eager --------------------------------------------------------------------------------------------------------------

    def _eager(self, batch):
        self.optimizer.zero_grad()
        with self._marked("compute"):
            with self._overlapped():
                out = self.forward_backward(*batch)
            with self._marked("optimizer"):
                self.optimizer.clip_next(self.clip)
                self.optimizer.step()
                self.norm = self.optimizer.norm
        self.optimizer.zero_grad()
        return out

    @contextmanager
    def _marked(self, part: str):
        if self.clock is not None:
            _C.clock_mark_begin(self.clock, part, stream_of(self.device))
        yield
        if self.clock is not None:  # not after an exception: the step is over then
            _C.clock_mark_end(self.clock, part, stream_of(self.device))

    def _aside(self, batch):
        """An eager step on the stream that captures: what is initialised on first use is initialised there."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            out = self._eager(batch)
        caller.wait_stream(self._stream)
        return out

    # ---- capture ------------------------------------------------------------------------------------------------------------

    def _capture(self, batch) -> _Captured | None:
        held, optimizer = self.optimizer.map, self.optimizer
        held.check()
        held.take_edits()
        optimizer.zero_grad()
        slots = [b.clone() if isinstance(b, torch.Tensor) else b for b in batch]
        self.norm = None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, sweeps, scale = torch.cuda.CUDAGraph(), None, 1.0
        given, optimizer.grad_scale = optimizer.grad_scale, 1.0
        gc.collect()  # a live autograd graph of before would break the capture
        torch.cuda.synchronize(self.device)
        failure = None
        if self.sync is not None:
            self.sync.settle()
            self.sync.agree(True)  # nobody captures while another rank still runs eagerly
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                with self._marked("compute"):
                    with self._overlapped():
                        out = self.forward_backward(*slots)
                    with self._marked("optimizer"):
                        inner = optimizer.grad_scale
                        if not isinstance(inner, torch.Tensor):  # a number goes with every replay's own
                            scale, inner, optimizer.grad_scale = inner, None, 1.0
                        optimizer.clip_next(self.clip)
                        sweeps = optimizer.plan()
                        optimizer.apply(sweeps, inner)
                        norm = optimizer.norm
        except Exception as error:
            if self.sync is not None:
                self.sync.drop()
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        finally:
            optimizer.forget_options()
            optimizer.grad_scale = given
            optimizer.zero_grad()
        if failure is not None or self.sync is not None:
            failure = self._agree(failure)
        if failure is not None:
            self._give_up(failure)
            return None
        if self._generation != optimizer.generation:  # the plan split step counts that others had captured
            self._captured.clear()
            self._generation = optimizer.generation
        return _Captured(graph, slots, out, norm, sweeps, scale)

    def _agree(self, failure: str | None) -> str | None:
        """All ranks replay or none does: a failure of one is everyone's."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        if self.sync is None:
            return failure
        if failure is not None:
            self.sync.cancel()
        if self.sync.agree(failure is None):
            return None
        self.sync.cancel()
        return failure or "on another rank"

    def _give_up(self, cause: str) -> None:
        self.reason = f"capturing the step failed: {cause}"
        warnings.warn(
            f"{self.reason}; steps run eagerly. hint: forward_backward must not read values of the device, and no graph of "
            "an earlier step may be alive",
            RuntimeWarning,
            stacklevel=4,
        )

    def _replay(self, captured: _Captured, batch):
        optimizer = self.optimizer
        optimizer.map.check()
        optimizer.map.take_edits()
        for slot, given in zip(captured.slots, batch):
            if isinstance(slot, torch.Tensor):
                slot.copy_(given, non_blocking=True)
        optimizer.grad_scale = scale = optimizer.grad_scale * captured.scale
        optimizer.advance(captured.sweeps)
        captured.graph.replay()
        if self.sync is not None:
            self.sync.replayed()
        optimizer.finish(captured.sweeps)
        plain = not isinstance(scale, torch.Tensor) and scale == 1.0
        self.norm = captured.norm if plain else captured.norm * scale
        return captured.out
