"""Copies of the small tensors of each step between the host and a device.

A copy from or to pinned memory is queued after earlier work, and the host continues. A copy from or to pageable memory
makes the host wait for all earlier work. Uploads therefore pin their source first. Downloads wait once for all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
"""Alignment of each array in a common copy, in bytes."""


def upload(values: Tensor | NDArray[Any] | Sequence[Any], device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`. The host does not wait for the copy. On the CPU, nothing is copied."""
    tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    if device.type == "cpu":
        return tensor
    # The caching allocator of pinned memory does not reuse the block before the copy is complete.
    return tensor.pin_memory().to(device, non_blocking=True)


class Uploads:
    """Small host arrays that are copied to a device together, because the host needs time for each copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arrays: list[NDArray[Any]] = []
        self._tensors: list[Tensor] = []

    def add(self, values: NDArray[Any] | Sequence[Any]) -> Callable[[], Tensor]:
        """Return a function that returns `values` on the device.

        The first call to any such function copies all arrays that were added so far.
        """
        number = len(self._arrays)
        self._arrays.append(np.ascontiguousarray(values))

        def tensor() -> Tensor:
            if number >= len(self._tensors):
                self._send(self._arrays[len(self._tensors) :])
            return self._tensors[number]

        return tensor

    def _send(self, arrays: list[NDArray[Any]]) -> None:
        if self.device.type == "cpu":
            self._tensors += map(torch.from_numpy, arrays)
            return
        starts = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
        whole = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        parts = whole.numpy()
        for array, start in zip(arrays, starts, strict=False):
            parts[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        away = whole.to(self.device, non_blocking=True)
        for array, start in zip(arrays, starts, strict=False):
            dtype = torch.from_numpy(array[:0]).dtype
            self._tensors.append(away[start : start + array.nbytes].view(dtype).view(array.shape))


def overwrite(target: Tensor, values: NDArray[Any]) -> None:
    """Copy `values` to a tensor on any device. The host does not wait for the copy."""
    tensor = torch.as_tensor(values)
    target.copy_(tensor if target.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)


class Download:
    """Copies of tensors to the host that are on their way. Tensors on the CPU are not copied."""

    def __init__(self, *tensors: Tensor) -> None:
        """Queue the copies on a stream of their own, behind earlier work on the current stream of each device."""
        self._sources = tensors  # must live until the copies are complete, because the allocator does not know of them
        self._streams = {one.device: _copy_stream(one.device) for one in tensors if one.device.type != "cpu"}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.accelerator.current_stream(device))
        self._here = [self._queued(tensor) for tensor in tensors]

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host, after a wait for the copies but not for later work."""
        # Do not wait for an event: if torch_npu's queue has failed, the event is never recorded, and the wait never
        # ends.
        for stream in self._streams.values():
            stream.synchronize()
        return self._here

    def _queued(self, tensor: Tensor) -> Tensor:
        if (stream := self._streams.get(tensor.device)) is None:
            return tensor
        with stream:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return pinned.copy_(tensor, non_blocking=True)


def download(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors on the host, after a single wait for all copies."""
    return Download(*tensors).wait()


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
