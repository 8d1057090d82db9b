# SPDX-License-Identifier: Apache-2.0
"""The experts of one layer on the map: a plan of the library over their weights, gradients written where the map has them."""

from __future__ import annotations

import torch

from . import _C
from .streams import DTYPES, stream_of


class ExpertSet:
    """SwiGLU experts of unequal hidden sizes.

    held: the map that has their parameters. weights: an expert a row, (gate, up, down) of shapes (f, d), (f, d), (d, f), or
    (gate_up, down) with gate's rows over up's. fused, instead: all experts in two parameters, (gate_up, down) of shapes
    (e, 2 f, d), (e, d, f). All are trained or none is.
    keep_h: SwiGLU's output is kept for the backward, rows * widest elements a call; False: it is made again from gu, for one
    more write of it and the same bits. May be set between calls. Experts that are not trained never need it.
    Raises NotImplementedError where the map or the device cannot serve them: the message says why.
    """

    def __init__(self, held, weights=(), *, fused=None, keep_h=True):
        self.held, self.weights, self.fused = held, [tuple(row) for row in weights], fused
        self.keep_h = keep_h
        self._pass, self._awaited = held.passes.n_ended, 0
        self._counts, self._offsets = False, []  # of forwards whose tokens ranks have not told each other yet (`skip_empty`)
        held.expert_sets.add(self)
        self.open()

    def open(self) -> None:
        """Again after the map was planned anew. Raises as the constructor does, and must then not be used."""
        held = self.held
        rows = [[held.block_of(p) for p in row] for row in ([self.fused] if self.fused else self.weights)]
        self.rows = rows
        self.blocks = [b for row in rows for b in row]
        first = self.blocks[0]
        if any(b is None for b in self.blocks):
            raise NotImplementedError("an expert's weight is not on the map")
        if len({b.param.dtype for b in self.blocks}) != 1 or first.param.dtype not in (torch.bfloat16, torch.float32):
            raise NotImplementedError("the experts' weights are not all bfloat16, or all float32")
        self.dtype, self.d = first.param.dtype, rows[0][-1].param.shape[-2]
        self.trained = first.grad is not None
        if any((b.grad is not None) != self.trained for b in self.blocks):
            raise NotImplementedError("some of the experts' weights are frozen and some are not")
        planes = ("weight", "grad") if self.trained else ("weight",)
        for row in rows:
            if len(row) == 3 and not all(_adjoin(getattr(row[0], plane), getattr(row[1], plane)) for plane in planes):
                raise NotImplementedError(f"{row[0].name} and {row[1].name} do not lie side by side in the map")
        hidden = [row[-1].param.shape[-1] for row in rows]
        places = [_addresses(rows, plane, part) for plane in planes for part in (0, -1)]
        places += [None] * (4 - len(places))
        hidden *= len(places[0]) // len(hidden)
        self.widest = max(hidden)
        try:
            self.handle = _C.loom_experts_open(
                held.device,
                self.d,
                2**31 - 1,
                DTYPES[self.dtype],
                DTYPES[first.grad.dtype if self.trained else torch.float32],
                hidden,
                *places,
            )
        except _C.Error as error:
            raise NotImplementedError(error.args[2]) from None

    def begin(self) -> tuple:
        """Before each forward, where grad mode is still the caller's. -> what its backward must be given.

        A set may run several times before one backward: with several ranks its gradients are announced by the last one."""
        self._counts = False
        if torch.is_grad_enabled() and self.trained:
            self._counts = self.held.sync is not None and self.held.sync.counts_tokens(self)
            if self._pass != self.held.passes.n_ended:  # what ran for nothing, in an evaluation say, is not waited for
                self._pass, self._awaited = self.held.passes.n_ended, 0
            self._awaited += 1
            hooked = next((b for b in self.blocks if _has_gradient_hook(b.param)), None)
            if hooked is not None:
                raise RuntimeError(
                    f"{hooked.name} has a hook on its gradient, which would not run: experts' gradients are written straight "
                    "into the map; hint: take the hook off, or undo(model)"
                )
        return self._versions()

    def _versions(self) -> tuple:
        return tuple(b.param._version for b in self.blocks)

    def forward(self, offset: torch.Tensor, xs: torch.Tensor):
        """offset: (e + 1) i32; xs: (rows, d) sorted by expert -> gu (regions of 2 f), h (of f; None: not kept), ys (rows, d)"""
        if self._counts:
            self._offsets.append(offset)
        rows = xs.shape[0]
        gu, h = xs.new_empty(rows * 2 * self.widest), xs.new_empty(rows * self.widest)
        ys = torch.empty_like(xs)
        _C.loom_experts_forward(
            self.handle, stream_of(xs), offset.data_ptr(), xs.data_ptr(), gu.data_ptr(), h.data_ptr(), ys.data_ptr()
        )
        return gu, h if self.keep_h and self.trained else None, ys

    def take_counts(self) -> torch.Tensor | None:
        """(e) on the device: tokens of each expert in all forwards since the last call; None: there was none that counts."""
        if not self._offsets:
            return None
        offsets, self._offsets = torch.stack(self._offsets), []
        return offsets.diff(dim=1).sum(0)

    def tokens_by_block(self, counts: list) -> list:
        """counts: (e) -> [(index of a block, its tokens)]"""
        if len(self.rows) != len(counts):  # all experts in the same parameters
            counts = [sum(counts)] * len(self.rows)
        return [(b.index, n) for row, n in zip(self.rows, counts) for b in row]

    def backward(self, begun: tuple, offset, xs, gu, h, dys) -> torch.Tensor:
        """begun: begin's; gu, h: forward's -> dxs (rows, d); gradients of the weights are in the map, announced."""
        if (now := self._versions()) != begun:
            changed = next(b for b, new, old in zip(self.blocks, now, begun) if new != old)
            raise RuntimeError(
                f"{changed.name} was changed between forward and backward; hint: step and edit weights after backward"
            )
        self._awaited = max(self._awaited - 1, 0)
        added = self.held.begin_write(self.blocks) if self.trained else False
        rows = xs.shape[0]
        dgu, dh, dxs = torch.empty_like(gu), xs.new_empty(rows * self.widest), torch.empty_like(xs)
        _C.loom_experts_backward(
            self.handle,
            stream_of(xs),
            offset.data_ptr(),
            xs.data_ptr(),
            gu.data_ptr(),
            h.data_ptr() if h is not None else 0,
            dys.data_ptr(),
            dgu.data_ptr(),
            dh.data_ptr(),
            dxs.data_ptr(),
            added,
        )
        if self.trained:
            self.held.end_write(self.blocks, added, final=not self._awaited)
        return dxs


def _addresses(rows, plane: str, part: int) -> list[int]:
    """Of the experts' gate_up (part 0) or down (-1) in a plane; of each slice where a block holds all experts."""
    tensors = [getattr(row[part], plane) for row in rows]
    return [t.data_ptr() for block in tensors for t in (block.unbind(0) if block.dim() == 3 else [block])]


def _has_gradient_hook(param) -> bool:
    """Beside the map's own."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


def _adjoin(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()
