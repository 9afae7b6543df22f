"""How often the host waits for the simulated NPU: what tests of other folders ask, too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest


@pytest.fixture
def waits(device: str) -> Callable[[], int]:
    """Each call: how often the host has waited since the last one. Skips where nothing counts that."""
    try:
        library = ctypes.CDLL("libhccl.so")  # which the process has loaded
        count, reset = library.sim_syncs, library.sim_syncs_reset
    except (OSError, AttributeError):
        pytest.skip(f"nothing counts how often {device} is waited for")
    count.restype = ctypes.c_long

    def since() -> int:
        found: int = count()
        reset()
        return found

    return since
