"""Counts of what a block of code sends to the simulated NPU. Tests in other folders also use them."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest


@dataclass
class Counts:
    """Numbers of a block of code, complete at its end."""

    launches: int = 0
    """Operators that the device runs, with copies within the device and collectives. A view is none."""
    hidden_copies: int = 0
    """Copies within operators, of operands and results that are not contiguous. They are not among the launches."""
    aicpu: int = 0
    """Launches whose dtype only the AI CPU supports."""
    uploads: int = 0
    """Copies from the host to the device."""
    downloads: int = 0
    """Copies from the device to the host."""
    pageable_copies: int = 0
    """Queued copies that wait because their memory on the host is pageable. They are also among the waits."""
    syncs: int = 0
    """Waits of the host for the device."""
    names: dict[str, Counter[str]] = field(default_factory=dict)
    """The operators among `launches`, `hidden copies` and `aicpu`, without collectives."""


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what the block sends to the simulated NPU. The process must have loaded torch_npu.

    The counters belong to the process, so blocks must not overlap in time.
    """
    from tests.ascend.operators import counts

    library = ctypes.CDLL("libhccl.so")  # the process has already loaded this library
    library.sim_counted.restype, library.sim_counted.argtypes = ctypes.c_long, [ctypes.c_char_p]
    library.sim_counts_reset()
    for operators in counts.names.values():
        operators.clear()
    found = Counts()
    try:
        yield found
    finally:
        for name in ("launches", "hidden_copies", "aicpu", "uploads", "downloads", "pageable_copies", "syncs"):
            setattr(found, name, library.sim_counted(name.replace("_", " ").encode()))
        found.names = {kind: Counter(operators) for kind, operators in counts.names.items()}


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
