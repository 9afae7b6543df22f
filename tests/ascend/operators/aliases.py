"""Host tensors that share the memory of device tensors. This works because the simulated device uses host memory."""

from __future__ import annotations

import torch
from torch import Tensor

_HOST = torch.device("cpu")


def on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def alias(tensor: Tensor) -> Tensor:
    """Return a host tensor that has the memory, sizes and strides of the device tensor `tensor`."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _HOST, storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())


def span(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address and the size in bytes of a tensor's memory, or None if the memory has gaps.

    The axes may be in any order in memory.
    """
    size = tensor.numel() * tensor.element_size()
    if size and not tensor.is_contiguous():
        strides = sorted(
            (stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1
        )
        expected = 1
        for stride, length in strides:
            if stride != expected:
                return None
            expected *= length
    return tensor.data_ptr(), size
