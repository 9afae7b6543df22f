"""Fixture that counts the host's waits for the simulated NPU. Tests of other folders use it too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest


@pytest.fixture
def waits(device: str) -> Callable[[], int]:
    """Return a function that counts the host's waits since its last call. Skip the test without a counter."""
    try:
        library = ctypes.CDLL("libhccl.so")  # the process has already loaded the library
        count, reset = library.sim_syncs, library.sim_syncs_reset
    except (OSError, AttributeError):
        pytest.skip(f"nothing counts how often {device} is waited for")
    count.restype = ctypes.c_long

    def since() -> int:
        found: int = count()
        reset()
        return found

    return since
