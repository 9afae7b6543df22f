"""Limits of this process on memory, CPU time and file writes (setrlimit)."""

from __future__ import annotations

import math
import resource
import time
from pathlib import Path

_STATUS = Path("/proc/self/status")


def limit_resources(memory_bytes: int) -> None:
    """Permanently limit the memory of this process, and forbid file writes and core dumps.

    Args:
        memory_bytes: Private memory in bytes that the process may allocate in addition to its current memory. 0 for no
            limit. Shared file mappings do not count.

    """
    # Python ignores SIGXFSZ, so a write to a file fails with EFBIG. Pipes, sockets and mappings are not affected.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _lower(_data_bytes() + memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def limit_processor_time(seconds: float) -> None:
    """Allow this process to use `seconds` more seconds of CPU time, rounded up. After that, SIGXCPU kills the process.

    Call this function before each item. It sets only the soft limit, so that a later call can raise the limit again.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (_lower(math.ceil(time.process_time() + seconds), hard), hard))


def _lower(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _data_bytes() -> int:
    """Return the private memory that RLIMIT_DATA counts, in bytes."""
    line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmData:"))
    return 1024 * int(line.split()[1])
