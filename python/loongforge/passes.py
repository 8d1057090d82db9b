# SPDX-License-Identifier: Apache-2.0
"""Backward passes over a map: who is told that a gradient is final, that a pass has ended, that one was found to have died."""

from __future__ import annotations

from contextlib import contextmanager

import torch


class Passes:
    def __init__(self):
        self._final: list = []
        self._ends: list = []
        self._aborts: list = []
        self._task = -1  # autograd's pass that the queued callback belongs to
        self._silent = False
        self.n_ended = 0  # where someone waits for their ends

    def on_gradient(self, fn) -> None:
        """fn(block): the block's gradient is final in the map."""
        self._final.append(fn)

    def on_end(self, fn) -> None:
        self._ends.append(fn)

    def on_abort(self, fn) -> None:
        """fn runs in the pass behind the one that died."""
        self._aborts.append(fn)

    def remove(self, *fns) -> None:
        for told in (self._final, self._ends, self._aborts):
            told[:] = [fn for fn in told if fn not in fns]

    @contextmanager
    def no_sync(self):
        """Gradients are accumulated but not announced: for all micro steps but the last."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def announce(self, block, final: bool = True) -> None:
        """Within a pass: the block's gradient is in the map; not final: another write of this pass follows."""
        if self._silent:
            return
        task = torch._C._current_graph_task_id()
        if self._task not in (-1, task):  # the pass that queued a callback never reached its end
            self._task = -1
            for fn in self._aborts:
                fn()
        if self._ends and self._task == -1 and task != -1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        for fn in self._final if final else ():
            fn(block)

    def forget(self) -> None:
        """A pass that will not end (its capture failed) is no abort."""
        self._task = -1

    def _ended(self) -> None:
        self._task = -1
        self.n_ended += 1
        for fn in self._ends:
            fn()
