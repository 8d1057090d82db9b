# SPDX-License-Identifier: Apache-2.0
"""The device's part of a training step, and its results, which are read when they are there."""

from __future__ import annotations

from collections import deque

import torch

from ..graph import StepGraph

FIELDS = ("images", "tokens", "labels", "attention_mask")
RESULTS = ("loss_sum", "n_tokens", "weight", "balance", "grad_norm")


class TrainStep:
    """Forward and backward of all micro steps, clipping and optimizer; one captured graph where it can be."""

    def __init__(
        self,
        model,
        optimizer,
        sync,
        *,
        micro_steps: int,
        clip: float,
        bf16: bool,
        capture: bool,
        clock=None,
        enter=lambda phase: None,
    ):
        """enter: told where the host is: forward, backward, optimizer (a replay of a captured step tells nothing)"""
        self.model, self.optimizer, self.sync, self.enter = model, optimizer, sync, enter
        self.micro_steps, self.bf16 = micro_steps, bf16
        self.device = optimizer.map.torch_device
        self.graph = StepGraph(
            self._forward_backward, optimizer, clip=clip, enabled=capture, clock=clock, sync=sync, overlap_update=True
        )

    def __call__(self, batches: list, sample_ids: list) -> torch.Tensor:
        """batches: of each micro step its FIELDS; sample_ids: of each (b,) int64 -> RESULTS, (5) f64 on the device, summed over
        micro steps (balance: of the last)"""
        flat = [tensor for batch, ids in zip(batches, sample_ids) for tensor in (*batch, ids)]
        results = self.graph(*flat)
        return torch.cat([results, self.graph.norm.view(1)])

    def _forward_backward(self, *flat) -> torch.Tensor:
        width, total = len(FIELDS) + 1, None
        for micro in range(self.micro_steps):
            batch = flat[micro * width : (micro + 1) * width]
            if micro + 1 < self.micro_steps and not self.sync.every_micro_step:
                with self.sync.no_sync():
                    one = self._one(*batch)
            else:
                one = self._one(*batch)
            self.enter("optimizer" if micro + 1 == self.micro_steps else "step")
            total = one if total is None else torch.cat([total[:3] + one[:3], one[3:]])
        if self.micro_steps > 1:  # the parts were weighted by their tokens: together they are the mean over the whole batch
            self.optimizer.grad_scale = total[2].clamp(min=1).reciprocal().float()
        return total

    def _one(self, images, tokens, labels, attention_mask, sample_ids) -> torch.Tensor:
        self.enter("forward")
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            out = self.model(images, tokens, labels, attention_mask, sample_ids=sample_ids)
        self.enter("backward")
        loss = out.loss if self.micro_steps == 1 else out.loss * out.n_tokens_global
        if self.sync.every_micro_step:  # its reductions are means, and the loss is this rank's share of a sum
            loss = loss * self.sync.world
        loss.backward()
        return torch.stack([v.detach().double() for v in (out.loss_sum, out.n_tokens, out.n_tokens_global, out.balance_loss)])


class LateResults:
    """Small results of steps on their way to the host. On a GPU a step's are read while the next ones run; on the CPU at once.

    take() -> [(tag, numbers)] of all steps that are done, oldest first, waiting until at most `depth` are open.
    """

    def __init__(self, device: torch.device, n: int, depth: int = 1):
        self.cuda = device.type == "cuda"
        self.depth = depth if self.cuda else 0
        self.open: deque = deque()
        self.spare = [self._slot(n) for _ in range(self.depth + 2)]

    def _slot(self, n: int):
        if not self.cuda:
            return torch.empty(n, dtype=torch.float64), None
        return torch.empty(n, dtype=torch.float64, pin_memory=True), torch.cuda.Event()

    def put(self, tag, results: torch.Tensor) -> None:
        slot, done = self.spare.pop()
        slot.copy_(results, non_blocking=True)
        if done is not None:
            done.record()
        self.open.append((tag, slot, done))

    def take(self, depth: int | None = None) -> list:
        depth, ready = self.depth if depth is None else depth, []
        while self.open:
            tag, slot, done = self.open[0]
            if done is not None:
                if len(self.open) <= depth and not done.query():
                    break
                done.synchronize()
            self.open.popleft()
            ready.append((tag, slot.tolist()))
            self.spare.append((slot, done))
        return ready
