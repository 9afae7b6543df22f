"""Copies: between host and device by torch_npu's own code, on the device by the host."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators import order
from tests.ascend.operators.aliases import alias, on_device

_NO_DOUBLE = "Device do not support double dtype now, dtype cast replace with float."
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


class Copies:
    """The kernels that move tensors; `_transfer` is what torch_npu registered for copy_ itself."""

    def __init__(self) -> None:
        self._transfer = torch.library.get_kernel("aten::copy_", "PrivateUse1")

    def copy_(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if on_device(target) and on_device(source):
            return _between(target, source)
        if on_device(target):  # it is the host that casts, on the way up and on the way down
            source = source.to(target.dtype)
        source = source.expand_as(target).contiguous()
        if target.is_contiguous() and target.dtype == source.dtype:
            self._transfer.call_boxed(_KEYS, target, source, non_blocking)
            return target
        piece = torch.empty(target.shape, dtype=source.dtype, device=target.device)
        # The second copy must find what the first brings: on the device it does, on the host only after a wait.
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
        """As ToKernelNpu.cpp in Ascend/pytorch (torch_npu/csrc/aten/common): a dtype alone is never float64."""
        if dtype is not None and layout is None and device is None:
            if tensor.dtype == dtype:
                return tensor
            if dtype == torch.float64:
                warnings.warn(_NO_DOUBLE, stacklevel=2)  # torch_npu says it once a process, in the log
                dtype = torch.float32
        device = tensor.device if device is None else device
        if device.type == "npu":
            shape = torch.empty_strided(tensor.size(), tensor.stride(), device="meta")
            strides = torch.empty_like(shape, memory_format=memory_format or torch.preserve_format).stride()
            out = torch.empty_strided(tensor.size(), strides, dtype=dtype or tensor.dtype, device=device)
        else:
            # As in torch's own, what is copied without a wait comes into pinned memory.
            pinned = bool(pin_memory) or non_blocking
            out = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device, pin_memory=pinned)
        return out.copy_(tensor, non_blocking)


def _between(target: Tensor, source: Tensor) -> Tensor:
    """Of tensors on devices; the copy is the target's, and the source's device has done before it what is queued."""
    order.note_read(order.begin(source.device), source)
    stream = order.begin(target.device)
    alias(target).copy_(alias(source))
    order.publish(stream, target)
    return target


def contiguous(tensor: Tensor, *, memory_format: Any = torch.contiguous_format) -> Tensor:
    return tensor if tensor.is_contiguous(memory_format=memory_format) else tensor.clone(memory_format=memory_format)


def dtype_cast(tensor: Tensor, dtype: Any, input_dtype: int | None = None) -> Tensor:
    """npu_dtype_cast: the same as `to`."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
