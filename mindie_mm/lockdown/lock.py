"""Locking a decoder in, and a report of what the kernel offers for that."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.lockdown import landlock, seccomp
from mindie_mm.lockdown.resource_limits import limit_resources
from mindie_mm.lockdown.system_calls import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, call, prctl

_DESCRIPTORS, _THREADS = Path("/proc/self/fd"), Path("/proc/self/task")
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_REASONS = {
    errno.ENOSYS: "this kernel does not have it",
    errno.EINVAL: "this kernel does not have it",
    errno.EOPNOTSUPP: "it is switched off at boot",
    errno.EPERM: "the container forbids it",
}


@dataclass(frozen=True, slots=True)
class Locks:
    """Mechanisms of the kernel that lock decoders in."""

    held: tuple[str, ...]
    """Names of the mechanisms that hold."""
    missing: tuple[str, ...]
    """Sentences about those that do not."""

    def __str__(self) -> str:
        """Return one line for an operator."""
        *others, last = self.held
        held = f"{', '.join(others)} and {last}" if others else f"{last} alone"
        return "; ".join([f"decoders are locked in by {held}", *self.missing])


def support() -> Locks:
    """Return the mechanisms that `lock_in` will find. Nothing is locked."""
    return _locks(landlock.abi, seccomp.available)


def lock_in(keep: Collection[int], memory_bytes: int = 0) -> Locks:
    """Take from this process all that a decoder does not need, for good.

    The process can then decode, receive and send on its descriptors, and end. It opens no file, makes no process or
    thread, and reaches no network. Call this function in a process with one thread, after `media.warm.warm_up` and
    after everything else that needs a file. A mechanism that the kernel lacks is left out.

    Args:
        keep: Descriptors that stay open, and may be written to. Sockets among them must be connected streams or
            sequenced packets, because a datagram socket sends to any address. Files cannot be written to even so, so a
            log needs a pipe. All other descriptors are closed, and objects that own one must live as long as the
            process. Standard streams lead to /dev/null then, so that no later descriptor gets their numbers.
        memory_bytes: Private memory that the process may take beyond what it has, in bytes. 0 for no limit.

    Returns:
        The mechanisms that hold.

    """
    assert len([*_THREADS.iterdir()]) == 1, "another thread would not be locked in"
    _close_others(keep)
    limit_resources(memory_bytes)
    _drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # Nobody without privileges may read this process's memory. Core dumps to a program ignore RLIMIT_CORE.
    prctl(PR_SET_DUMPABLE, 0)
    return _locks(landlock.forbid_all, lambda: seccomp.allow_decoding(keep))


def _locks(apply_landlock: Callable[[], object], apply_seccomp: Callable[[], object]) -> Locks:
    held: list[str] = []
    missing: list[str] = []
    with _noting("Landlock", missing):
        name = f"Landlock (ABI {landlock.abi()})"
        apply_landlock()
        held.append(name)
    with _noting("seccomp", missing):
        apply_seccomp()
        held.append("seccomp")
    return Locks((*held, "resource limits"), tuple(missing))


@contextmanager
def _noting(name: str, missing: list[str]) -> Iterator[None]:
    """Note a mechanism that the kernel refuses, with the reason."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0)
        if reason is None:
            raise
        missing.append(f"{name} is missing: {reason}")


def _drop_capabilities() -> None:
    """Give up what root may do beyond other users."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    with suppress(OSError):  # refused on other architectures, and where there is nothing to give up
        call("capset", ctypes.byref(header), ctypes.byref(nothing))


def _close_others(keep: Collection[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in {0, 1, 2}.difference(keep):
        os.dup2(nothing, standard)
    for entry in [*_DESCRIPTORS.iterdir()]:
        if (descriptor := int(entry.name)) > 2 and descriptor not in keep:
            os.closerange(descriptor, descriptor + 1)  # no error for that of the list itself, which is closed
