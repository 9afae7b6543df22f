"""Limits of this process on memory and file writes (setrlimit)."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")
_STACK_BYTES = 8 * 2**20
"""Maximum size of the stack in bytes, which RLIMIT_DATA does not count. It is the default of most systems."""


def limit_resources(memory_bytes: int) -> None:
    """Permanently limit the memory of this process, and forbid file writes and core dumps.

    RLIMIT_DATA counts private writable memory. The system call filter (`allowed_calls`) prevents other new memory.

    Args:
        memory_bytes: Memory in bytes that the process may allocate in addition to its current memory. 0 for no limit.

    """
    # Python ignores SIGXFSZ, so a write to a file fails with EFBIG. Pipes, sockets and mappings are not affected.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack = _lower(_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[0])
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    if memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _lower(_data_bytes() + memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _lower(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _data_bytes() -> int:
    """Return the private memory that RLIMIT_DATA counts, in bytes."""
    line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmData:"))
    return 1024 * int(line.split()[1])
