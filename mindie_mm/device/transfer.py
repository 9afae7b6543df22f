"""Small tensors of every step, between the host and a device.

From memory that the driver has pinned a copy is queued behind the work that was queued before, and the host goes on;
from other memory it waits until all of that is done. So what goes up is pinned first, and what comes down waits once
for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: Tensor | NDArray[Any] | Sequence[Any], device: torch.device) -> Tensor:
    """`values` as a tensor on `device`, without a wait of the host's; on the host they are not copied."""
    tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    if device.type == "cpu":
        return tensor
    # The caching allocator of pinned memory gives it to nobody else before the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


def download(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the host, behind one wait of the host's for all of them; those of the host as they are."""
    away = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    if not away:
        return [*tensors]
    here = [tensor if tensor.device.type == "cpu" else _queued(tensor) for tensor in tensors]
    for device in away:
        torch.accelerator.current_stream(device).synchronize()
    return here


def _queued(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
