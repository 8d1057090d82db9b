# SPDX-License-Identifier: Apache-2.0
"""Devices, streams and borrowed memory between PyTorch and the library."""

from __future__ import annotations

import torch

from . import _C

DTYPES = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float64: 4,
    torch.int64: 5,
    torch.int32: 6,
    torch.uint8: 7,
    torch.bool: 8,
}
TORCH_DTYPES = {number: dtype for dtype, number in DTYPES.items()}
_devices: dict = {}


def device_of(tensor_or_device):
    """The library's handle of a torch device, opened once."""
    device = tensor_or_device.device if isinstance(tensor_or_device, torch.Tensor) else torch.device(tensor_or_device)
    name = str(device)
    if name not in _devices:
        _devices[name] = _C.device_open(name)
    return _devices[name]


def stream_of(tensor_or_device) -> int:
    """PyTorch's current stream of the device as the library takes it; 0 on the CPU."""
    device = tensor_or_device.device if isinstance(tensor_or_device, torch.Tensor) else torch.device(tensor_or_device)
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def borrow(device, address: int, shape, dtype, owner=None) -> torch.Tensor:
    """Memory of the library as a tensor. owner: the handle it belongs to, kept alive by the tensor; None: the caller does."""
    return torch.utils.dlpack.from_dlpack(_C.device_tensor(device, address, tuple(shape), DTYPES[dtype], owner))
