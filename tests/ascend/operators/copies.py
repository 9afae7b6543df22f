"""Kernels that copy tensors.

torch_npu's own code copies between host and device. The host makes copies within the device.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators import counts, graphs, order
from tests.ascend.operators.aliases import alias, on_device

_NO_DOUBLE = "Device do not support double dtype now, dtype cast replace with float."
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


class Copies:
    """Kernels that copy tensors. `_transfer` is torch_npu's own kernel for copy_."""

    def __init__(self) -> None:
        self._transfer = torch.library.get_kernel("aten::copy_", "PrivateUse1")

    def copy_(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if on_device(target) and on_device(source):
            return _between(target, source)
        if on_device(target):  # the host converts the dtype, whatever the direction of the copy
            source = source.to(target.dtype)
        source = source.expand_as(target).contiguous()
        if target.is_contiguous() and target.dtype == source.dtype:
            self._transfer.call_boxed(_KEYS, target, source, non_blocking)
            return target
        piece = torch.empty(target.shape, dtype=source.dtype, device=target.device)
        # On the host, the second copy must wait for the first. On the device, the stream keeps the copies in order.
        self._transfer.call_boxed(_KEYS, piece, source, non_blocking and on_device(target))
        target.copy_(piece)
        return target

    def to_copy(
        self,
        tensor: Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        """Convert a tensor as torch_npu's csrc/aten/common/ToKernelNpu.cpp does.

        If only a dtype is given, float64 becomes float32.
        """
        if dtype is not None and layout is None and device is None:
            if tensor.dtype == dtype:
                return tensor
            if dtype == torch.float64:
                warnings.warn(_NO_DOUBLE, stacklevel=2)  # torch_npu logs this once per process
                dtype = torch.float32
        device = tensor.device if device is None else device
        if device.type == "npu":
            shape = torch.empty_strided(tensor.size(), tensor.stride(), device="meta")
            strides = torch.empty_like(shape, memory_format=memory_format or torch.preserve_format).stride()
            out = torch.empty_strided(tensor.size(), strides, dtype=dtype or tensor.dtype, device=device)
        else:
            # As in torch, a copy that does not wait needs pinned memory.
            pinned = bool(pin_memory) or non_blocking
            out = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device, pin_memory=pinned)
        return out.copy_(tensor, non_blocking)


def _between(target: Tensor, source: Tensor) -> Tensor:
    """Copy between devices on the stream of the target, after the work that is queued on the stream of the source."""
    stream = order.begin(target.device)
    if graphs.mode(stream):
        own, other = alias(target), alias(source)
        graphs.capture(stream, "copy_", lambda: own.copy_(other), [source], [target])
        counts.launched(
            stream, "aten::copy_", {"self": target, "src": source}, [target, source], [target], None, captured=True
        )
        return target
    order.note_read(order.begin(source.device), source)
    stream = order.begin(target.device)
    counts.launched(stream, "aten::copy_", {"self": target, "src": source}, [target, source], [target], None)
    alias(target).copy_(alias(source))
    order.publish(stream, target)
    return target


def contiguous(tensor: Tensor, *, memory_format: Any = torch.contiguous_format) -> Tensor:
    return tensor if tensor.is_contiguous(memory_format=memory_format) else tensor.clone(memory_format=memory_format)


def dtype_cast(tensor: Tensor, dtype: Any, input_dtype: int | None = None) -> Tensor:
    """Convert the dtype as `to` does (npu_dtype_cast)."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
