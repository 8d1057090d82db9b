# SPDX-License-Identifier: Apache-2.0
"""MemSculptor: the lifetimes of a step's tensors, and a plan of where each could lie."""

from __future__ import annotations

import re
import warnings
import weakref
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import _C
from .mapping import ROLE_NAMES, ParameterMap, current, map_of

_WEIGHT, _ACTIVATION, _GRADIENT, _OPTIMIZER, _WORKSPACE, _INPUT = range(6)
_ROLE_OF_PLANE = (_WEIGHT, _GRADIENT, _OPTIMIZER, _OPTIMIZER, _OPTIMIZER)
_BYTES = {1: 4, 2: 2, 3: 2}  # of an element, by the library's dtype
_active: Recorder | None = None


class Recorder(TorchDispatchMode):
    """Notes when each storage is first made and when it is freed, counted in operators. One step, one thread.

    What torch.compile has compiled runs as it always does, so the traced step has the bits of any other; of its insides only what
    goes in and comes out is seen."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # asked by PyTorch 2.10 and later; before, compiled code ran eagerly in a mode
        return True

    def __init__(self, model: nn.Module, known: set):
        super().__init__()
        self.model, self.known = model, known  # addresses of memory that the map owns
        self.ordinal = 0
        self.rows: list = []  # [name, module, role, first, last or None, bytes]
        self._live: dict = {}  # address -> row number; a freed address may come again
        self._names = {id(module): name for name, module in model.named_modules()}
        self._path: list = []
        self._hooks: list = []

    def __enter__(self):
        self._quiet = warnings.catch_warnings()
        self._quiet.__enter__()
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        # Not on the modules: fused layers step aside for hooks on their parts, and another step than the usual would be seen.
        hooks = torch.nn.modules.module
        self._hooks.append(hooks.register_module_forward_pre_hook(self._entered))
        self._hooks.append(hooks.register_module_forward_hook(self._left, always_call=True))
        return super().__enter__()

    def _entered(self, module, args) -> None:
        if id(module) in self._names:
            self._path.append(self._names[id(module)])

    def _left(self, module, args, out) -> None:
        if id(module) in self._names:
            self._path.pop()

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()
        self._quiet.__exit__(*exc)
        return super().__exit__(*exc)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ordinal += 1
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor) and t.grad_fn is None:
                self._see(t, "input", _INPUT, first=0)
            elif isinstance(t, torch.Tensor):  # made where no operator was seen
                self._see(t, "compiled", _ACTIVATION, first=self.ordinal)
        out = func(*args, **(kwargs or {}))
        backward = torch._C._current_graph_task_id() != -1
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._see(t, str(func).removeprefix("aten."), _GRADIENT if backward else _ACTIVATION, first=self.ordinal)
        return out

    def _see(self, tensor, name: str, role: int, first: int) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address == 0 or address in self.known or address in self._live:
            return
        number = len(self.rows)
        self.rows.append([name, self._path[-1] if self._path else "", role, first, None, storage.nbytes()])
        self._live[address] = number
        weakref.finalize(storage, self._freed, address, number)

    def _freed(self, address: int, number: int) -> None:
        if self.rows[number][4] is None:
            self.rows[number][4] = self.ordinal + 1
        if self._live.get(address) == number:
            del self._live[address]

    def label(self, tensor, pool: str) -> None:
        number = self._live.get(tensor.untyped_storage().data_ptr())
        if number is not None:
            self.rows[number][1] = f"{self.rows[number][1]} [{pool}]".strip()


class MemSculptor:
    """Plans a model's memory: parameters on the map now, a step's tensors as a table and a plan of offsets.

    model: accelerated, or an ordinary module, which is then put on a map. strategy: moefusion (search) or greedy.
    Other options of section [sculptor] by name (`loongforge config sculptor`).
    """

    def __init__(self, model: nn.Module, strategy: str = "moefusion", **options):
        self.map: ParameterMap = map_of(model) or ParameterMap(model)
        self.options = _C.options_check("sculptor", dict(options, strategy=strategy))
        self.summary: dict | None = None
        self._trace = None

    @contextmanager
    def trace(self):
        """Record the lifetimes of everything that happens inside: one whole training step."""
        global _active
        if _active is not None:
            raise RuntimeError("a step is being traced already")
        known = {t.data_ptr() for b in self.map.blocks for t in (b.weight, b.grad, b.master) if t is not None}
        recorder = Recorder(self.map.model, known)
        try:
            _active = recorder
            with recorder:
                yield recorder
        finally:
            _active = None
        self._keep(recorder)

    def _keep(self, recorder: Recorder) -> None:
        """The recorded rows and the map's planes as one lifetime table, planned."""
        trace, end = _C.trace_open(), recorder.ordinal + 1
        for name, _, klass, _, _, capacity in _C.map_pools(self.map.handle):
            if klass < 0:  # an arena, in bytes
                _C.trace_add(trace, name, name, _WORKSPACE, 0, 0, end, capacity)
                continue
            for role, dtype in enumerate(_C.map_classes(self.map.handle)[klass]["role_dtype"]):
                if dtype:
                    _C.trace_add(
                        trace,
                        f"{name}.{ROLE_NAMES[role]}",
                        name,
                        _ROLE_OF_PLANE[role],
                        0,
                        0,
                        end,
                        capacity * _BYTES[dtype],
                    )
        for name, module, role, first, last, size in recorder.rows:
            if size > 0:
                _C.trace_add(trace, name, module, role, 0, first, max(last or end, first + 1), size)
        self._trace = trace
        self.summary = dict(
            _C.trace_plan(trace, self.options), operators=recorder.ordinal, map_bytes=_C.map_bytes(self.map.handle)
        )

    def analyze_lifecycle(self, step=None) -> list:
        """The lifetime table: a dict a tensor with name, module, role, bytes, first and last ordinal, planned offset.

        step: a function that runs one training step, traced now; without it the last trace is used.
        """
        if step is not None:
            with self.trace():
                step()
        if self._trace is None:
            raise RuntimeError(
                "no step has been traced; hint: analyze_lifecycle(step=function), or `with sculptor.trace():` around one"
            )
        columns = ("name", "module", "role", "stream", "first", "last", "bytes", "align", "offset")
        return [dict(zip(columns, row)) for row in _C.trace_rows(self._trace)]

    def write_csv(self, path) -> None:
        """The lifetime table as CSV, readable by `loongforge mem`."""
        if self._trace is None:
            raise RuntimeError("no step has been traced")
        _C.trace_write_csv(self._trace, str(path))

    def report(self) -> str:
        """Live against planned bytes, in a line."""
        if self.summary is None:
            return "memory: no step traced"
        s, mib = self.summary, 2**20
        return (
            f"memory: {s['n']} tensors over {s['operators']} operators, {s['bound_bytes'] / mib:.1f} MiB live at most, "
            f"{s['peak_bytes'] / mib:.1f} MiB planned (waste {100 * s['waste']:.2f} %), the map {s['map_bytes'] / mib:.1f} MiB"
        )

    def set_pool_size(self, pool: str, size_bytes: float) -> None:
        """Give a pool head-room (`expert_3`: that expert in every layer) and plan anew; contents follow. At a step edge."""
        self.map.set_pool_size(pool, size_bytes)

    @staticmethod
    def bind_to_pool(tensor: torch.Tensor, pool: str) -> torch.Tensor:
        """A parameter: check that it lies in that pool. Any other tensor: say which pool it belongs to in the lifetime table.

        Acts on the current map. -> the tensor
        """
        held = current()
        block = held.block_of(tensor)
        names = {p[0] for p in _C.map_pools(held.handle)}
        match = re.fullmatch(r"expert_(\d+)", pool)
        if pool not in names and not (match and any(n.split(".")[0].endswith(f"/expert{int(match[1]):02d}") for n in names)):
            raise ValueError(f"pool {pool!r} is unknown, expected expert_<n> or one of {len(names)} names such as {min(names)!r}")
        if block is not None and pool not in (block.info["pool"], f"expert_{block.info['expert']}"):
            raise ValueError(
                f"parameter {block.name} lies in pool {block.info['pool']}, not in {pool}; hint: their module places them"
            )
        if block is None and _active is not None:
            _active.label(tensor, pool)
        return tensor

    @staticmethod
    def pre_forward_hook(module, args) -> None:
        """For `module.register_forward_pre_hook`, as in the brief: the module's parameters must lie on the current map."""
        held = current()
        for name, p in module.named_parameters(recurse=False):
            if held.block_of(p) is None:
                raise RuntimeError(
                    f"parameter {name} of {type(module).__name__} is not on the current map; hint: accelerate the model first"
                )
