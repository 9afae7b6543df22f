"""Sandboxing with Landlock (docs.kernel.org/userspace-api/landlock.html).

Landlock can deny a process access to files by path, TCP, signals to other processes, and abstract sockets of other
processes. It does not restrict the use of descriptors that are already open.
"""

from __future__ import annotations

import ctypes
import errno
import os

from mindie_mm.lockdown.system_calls import call

_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_FIELDS = 3
"""Number of 64-bit fields of struct landlock_ruleset_attr: file system, network and scope."""


def abi() -> int:
    """Return the version of Landlock in this kernel.

    Raises:
        OSError: The kernel has no Landlock (ENOSYS), or Landlock is disabled (EOPNOTSUPP) or forbidden (EPERM).

    """
    return call("landlock_create_ruleset", None, 0, _VERSION)


def forbid_all() -> None:
    """Permanently drop all rights that this kernel's Landlock handles, for this thread and its children.

    The thread must have set `no_new_privs`.

    Raises:
        OSError: In the same cases as `abi`.

    """
    abi()  # raises if Landlock is missing
    ruleset = _ruleset(*map(_known, range(_FIELDS)))
    try:
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _known(field: int) -> int:
    """Return a bit mask of all rights of a field that this kernel supports.

    This function tries out which rights the kernel accepts, because each version of Landlock adds rights. Rights are
    numbered from bit 0 without gaps.
    """
    known = 0
    while known < 2**63:
        further = known << 1 | 1
        try:
            os.close(_ruleset(*(further if field == index else 0 for index in range(_FIELDS))))
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.E2BIG}:  # unknown right, unknown field
                raise
            break
        known = further
    return known


def _ruleset(*rights: int) -> int:
    """Return the descriptor of a ruleset that forbids `rights`, one bit mask per field."""
    fields = (ctypes.c_uint64 * _FIELDS)(*rights)
    return call("landlock_create_ruleset", ctypes.byref(fields), ctypes.sizeof(fields), 0)
