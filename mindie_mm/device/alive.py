"""A check that a device still computes after a failure."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from secrets import randbits

import torch

from mindie_mm.device.transfer import download, upload
from mindie_mm.errors import DeviceError

_numbers = count(randbits(60))


def require_alive(device: torch.device) -> None:
    """Raise DeviceError, or the device's own error, if the device no longer computes in this process.

    A call without an error proves nothing. After a failure in torch_npu's queue (TASK_QUEUE_ENABLE is 1 by default),
    all calls succeed without doing anything. This function therefore computes a number that no earlier call can have
    left in memory. If the check fails, only another process can use the device.
    """
    if device.type == "cpu":
        return
    number = next(_numbers)
    with suppress(torch.OutOfMemoryError):  # a device that is out of memory still computes
        (answer,) = download(upload([number], device) + 1)
        if answer.tolist() != [number + 1]:
            raise DeviceError(f"{device} computes wrong results: {number} + 1 gives {answer.item()}")
