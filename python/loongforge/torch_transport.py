# SPDX-License-Identifier: Apache-2.0
"""A torch.distributed process group as a transport of NexusSync's."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from . import _C, peers
from .mapping import GRAD
from .streams import TORCH_DTYPES, borrow

# Newer names first; builds of torch without distributed have none of these.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def _on(stream: int, tensor: torch.Tensor):
    """PyTorch's current stream is this one, where the device has streams."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, tensor.device)) if stream and tensor.is_cuda else nullcontext()


class TorchTransport:
    """Collectives of a torch.distributed process group behind the library's transport table.

    Called by the library from whichever thread finishes a gradient, with sparse reductions on the CPU from a worker of its own;
    `post` returns at once, `wait` blocks. A collective that failed cannot be taken back and may still write when a stopped rank
    goes on. So what does not lie in the map is summed in a copy, and what failed is kept for good, the map too.
    """

    def __init__(self, device, memory, group=None, on_cpu: bool = True):
        """memory: the map's handle, in which gradients lie"""
        self.device, self.memory, self.peers = device, memory, peers.of(group)
        self.rank, self.world = self.peers.rank, self.peers.world
        flats = [
            torch.utils.dlpack.from_dlpack(_C.map_flat(memory, klass, 0, info["count"], GRAD))
            for klass, info in enumerate(_C.map_classes(memory))
            if info["role_dtype"][GRAD] and info["count"]
        ]
        self._planes = [(f.data_ptr(), f.data_ptr() + f.numel() * f.element_size()) for f in flats]
        self._work: dict = {}
        self._next = 0
        backend = dist.get_backend(group)
        if backend != "nccl":  # gloo and MPI sum whole chunks; gloo gathers on the CPU alone
            self.scatter = None
        if backend != "nccl" and not (backend == "gloo" and on_cpu):
            self.gather = None

    def _start(self, begin, target: torch.Tensor, stream: int, in_place: bool) -> int:
        """begin(tensor): starts a collective that writes into it"""
        self._next += 1
        try:
            with _on(stream, target):
                tensor = target if in_place else target.clone()
                work = begin(tensor)
        except RuntimeError as error:
            self._abandon()
            raise peers.PeerError(peers.words(error)) from error
        self._work[self._next] = (work, tensor, target)
        return self._next

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.world, -1)[self.rank]

    def post(self, address: int, count: int, dtype: int, stream: int) -> int:
        target, group = borrow(self.device, address, (count,), TORCH_DTYPES[dtype]), self.peers.group
        in_map = any(a <= address < b for a, b in self._planes)
        return self._start(lambda to: dist.all_reduce(to, group=group, async_op=True), target, stream, in_map)

    def scatter(self, address: int, count: int, dtype: int, stream: int) -> int:
        target, group = borrow(self.device, address, (count,), TORCH_DTYPES[dtype]), self.peers.group
        return self._start(lambda to: _reduce_scatter(self._own(to), to, group=group, async_op=True), target, stream, True)

    def gather(self, address: int, count: int, dtype: int, stream: int) -> int:
        target, group = borrow(self.device, address, (count,), TORCH_DTYPES[dtype]), self.peers.group
        return self._start(lambda to: _all_gather(to, self._own(target), group=group, async_op=True), target, stream, False)

    def wait(self, ticket: int, stream: int, timeout_s: float) -> None:
        work, tensor, target = self._work[ticket]
        try:
            with _on(stream, target):
                self.peers.wait(work, timeout_s)
                if tensor is not target:
                    target.copy_(tensor)
        except BaseException:
            self._abandon()
            raise
        del self._work[ticket]

    def _abandon(self) -> None:
        peers.abandoned.append((self.memory, list(self._work.values())))
