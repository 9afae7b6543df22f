"""Whether a device still computes after something on it has failed."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from secrets import randbits

import torch

from mindie_mm.device.transfer import download, upload
from mindie_mm.errors import DeviceError

_numbers = count(randbits(60))


def require_alive(device: torch.device) -> None:
    """DeviceError, or what the device raises, where it no longer computes: only another process can use it then.

    A call that succeeds tells nothing: after a failure in torch_npu's queue (TASK_QUEUE_ENABLE is 1 by default) all do,
    and do nothing. So a number is asked for that no memory holds from before.
    """
    if device.type == "cpu":
        return
    number = next(_numbers)
    with suppress(torch.OutOfMemoryError):  # it is there, and full
        (answer,) = download(upload([number], device) + 1)
        if answer.tolist() != [number + 1]:
            raise DeviceError(f"{device} no longer computes: {number} + 1 is {answer.item()} there")
