"""Landlock: no file by its path, no TCP, no signal and no abstract socket beyond this process.

Documented at docs.kernel.org/userspace-api/landlock.html. Descriptors that are open already keep what they can do.
"""

from __future__ import annotations

import ctypes
import errno
import os

from mindie_mm.lockdown.system_calls import call

_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_FIELDS = 3
"""File system, network and scope: the 64-bit fields of struct landlock_ruleset_attr."""


def abi() -> int:
    """Return the version of Landlock in this kernel.

    Raises:
        OSError: The kernel has no Landlock (ENOSYS), or it is switched off (EOPNOTSUPP), or forbidden (EPERM).

    """
    return call("landlock_create_ruleset", None, 0, _VERSION)


def forbid_all() -> None:
    """Take every right that this kernel's Landlock knows from this thread and its children, for good.

    The thread needs `no_new_privs`.

    Raises:
        OSError: As in `abi`.

    """
    abi()  # so that a missing Landlock is not taken for a field that the kernel does not know
    ruleset = _ruleset(*map(_known, range(_FIELDS)))
    try:
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _known(field: int) -> int:
    """Return all rights of a field that the kernel knows, which begin at bit 0.

    The kernel is asked, because each version of Landlock adds rights.
    """
    known = 0
    while known < 2**63:
        further = known << 1 | 1
        try:
            os.close(_ruleset(*(further if field == index else 0 for index in range(_FIELDS))))
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.E2BIG}:  # an unknown right, an unknown field
                raise
            break
        known = further
    return known


def _ruleset(*rights: int) -> int:
    """Return a descriptor of a ruleset that forbids `rights`, a bit set for each field."""
    fields = (ctypes.c_uint64 * _FIELDS)(*rights)
    return call("landlock_create_ruleset", ctypes.byref(fields), ctypes.sizeof(fields), 0)
