"""Virtual time of the simulated NPU: how long the device is idle, independently of the machine that runs the test.

The host's clock advances by a fixed cost for each launch, copy, wait and event. The device's clock advances by the
bytes and operations of each kernel. A wait moves the host's clock to the end of what it waits for. Use virtual time in
a process of its own: `call(function, **CLOCK)`, with `measured()` in the function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

CLOCK: Mapping[str, str | int] = {"clock": 1}
"""Settings of `processes.call` that switch the clocks on. `environment.environment` lists the costs, as settings."""

_WEIGHT_BYTES = 14_100_000_000
"""Weights that a decode step of Qwen2.5-VL-7B reads in bfloat16: all but the tower and the embedding of ids."""


def as_slow_as_7b(weight_bytes: int) -> dict[str, str | int]:
    """Return settings in which a small model takes as long to read its weights as Qwen2.5-VL-7B.

    Args:
        weight_bytes: Size of the weights that a decode step of the small model reads.

    """
    return {**CLOCK, "memory_bytes_per_us": max(1, 1_200_000 * weight_bytes // _WEIGHT_BYTES)}


@dataclass
class Times:
    """Times of a block of code in microseconds, complete at its end."""

    device_us: float = 0.0
    """From the end of the device's work before the block to the end of the device's work of the block."""
    idle_us: float = 0.0
    """Part of `device_us` in which no stream computes or communicates. Copies from and to the host count as idle."""
    host_us: float = 0.0
    """Progress of this thread's host clock."""

    @property
    def idle(self) -> float:
        """Share of the time in which the device is idle."""
        return self.idle_us / self.device_us if self.device_us else 0.0


@contextmanager
def measured(device: int = 0) -> Iterator[Times]:
    """Measure a block that may contain one or many steps. Work of the block may still be queued at its end."""
    library = _library()
    start, host = library.sim_device_ns(device), library.sim_host_ns()
    times = Times()
    try:
        yield times
    finally:
        stop = library.sim_device_ns(device)
        times.device_us = (stop - start) / 1e3
        times.idle_us = (stop - start - library.sim_busy_ns(device, start, stop)) / 1e3
        times.host_us = (library.sim_host_ns() - host) / 1e3


def work(microseconds: float) -> None:
    """Add work of the calling thread to its host clock, such as the time that a scheduler takes."""
    _library().sim_host_work(int(1e3 * microseconds))


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libhccl.so")  # the process has already loaded this library
    for name in ("sim_device_ns", "sim_host_ns", "sim_busy_ns"):
        getattr(library, name).restype = ctypes.c_uint64
    library.sim_busy_ns.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
    library.sim_host_work.argtypes = [ctypes.c_uint64]
    return library
