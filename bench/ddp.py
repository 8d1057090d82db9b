# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel around an accelerated model: the peer of NexusSync, on the same kernels and the same map.

DDP learns of a gradient from the node that accumulates it. The experts' gradients are written straight into the map, so a
function in front of each mixture hands DDP nothing for them, behind the write: the node runs, and DDP finds the map's view in
`.grad`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel


class Tell(torch.autograd.Function):
    """x: any shape -> x. Backward: the nodes of `params` run, behind everything that x went into."""

    @staticmethod
    def forward(ctx, x, *params):
        ctx.n = len(params)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return dx, *[None] * ctx.n


class LossOf(nn.Module):
    """images, tokens -> loss: what DDP calls, which wants tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, tokens):
        return self.model(images, tokens).loss


def wrap(model, *, bucket_mb: int, group=None) -> DistributedDataParallel:
    """model: a woven Gr00tN16 on a map whose gradients have the weights' dtype. Its gradients are means over ranks when backward
    returns. Buckets are not views: the map's own tensors stay `.grad`, and DDP copies there and back."""
    for layer in model.layers:
        params = list(layer.moe.experts.parameters())
        told = layer.attention.register_forward_hook(lambda m, args, out, params=params: Tell.apply(out, *params))
        layer.attention.__dict__["_told"] = told
    return DistributedDataParallel(LossOf(model), bucket_cap_mb=bucket_mb, process_group=group)


def unwrap(model) -> None:
    """Without this a second wrapper would be told twice."""
    for layer in model.layers:
        layer.attention.__dict__.pop("_told").remove()
