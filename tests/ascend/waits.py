"""A fixture that counts how often the host waits for the simulated NPU. Tests in other folders also use it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest


@pytest.fixture
def waits(device: str) -> Callable[[], int]:
    """Return a function that returns how often the host has waited since its last call.

    Skip the test if nothing counts the waits for this device.
    """
    try:
        library = ctypes.CDLL("libhccl.so")  # the process has already loaded this library
        count, reset = library.sim_syncs, library.sim_syncs_reset
    except (OSError, AttributeError):
        pytest.skip(f"nothing counts how often {device} is waited for")
    count.restype = ctypes.c_long

    def since() -> int:
        found: int = count()
        reset()
        return found

    return since
