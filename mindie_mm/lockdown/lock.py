"""Sandbox of a decoder process, and a report of the kernel mechanisms that it uses."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
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
    errno.ENOSYS: "this kernel does not support it",
    errno.EINVAL: "this kernel does not support it",
    errno.EOPNOTSUPP: "it is disabled at boot",
    errno.EPERM: "the container forbids it",
}


@dataclass(frozen=True, slots=True)
class Locks:
    """Kernel mechanisms that sandbox decoders."""

    held: tuple[str, ...]
    """Names of the mechanisms in effect."""
    missing: tuple[str, ...]
    """Messages about missing mechanisms."""

    def __str__(self) -> str:
        """Describe the mechanisms in one line for the operator."""
        *others, last = self.held
        held = f"{', '.join(others)} and {last}" if others else f"{last} only"
        return "; ".join([f"decoders are sandboxed by {held}", *self.missing])


def support() -> Locks:
    """Return the mechanisms that are available to `lock_in`, without applying them."""
    return _locks(landlock.abi, seccomp.available)


def lock_in(keep: Collection[int], memory_bytes: int = 0) -> Locks:
    """Permanently drop all rights of this process that a decoder does not need.

    The process can then decode, send and receive on its descriptors, and exit. It cannot open files, create processes
    or threads, or access the network. Call this function in a process with a single thread, after
    `media.warm.warm_up` and after all other code that opens files. Mechanisms that the kernel lacks are skipped.

    Args:
        keep: Descriptors that stay open and writable. Sockets must be connected and of type SOCK_STREAM or
            SOCK_SEQPACKET, because a datagram socket can send to any address. Regular files are never writable, so a
            log needs a pipe. All other descriptors are closed. A Python object that owns a closed descriptor must live
            as long as the process. Standard streams that are not in `keep` are redirected to /dev/null, so that no
            later descriptor gets their numbers.
        memory_bytes: Private memory in bytes that the process may allocate in addition to its current memory. 0 for no
            limit.

    Returns:
        The mechanisms in effect.

    """
    assert len([*_THREADS.iterdir()]) == 1, "the process has several threads, but only this one would be restricted"
    _close_others(keep)
    _reset_signals()
    limit_resources(memory_bytes)
    _drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # After this call, only privileged processes can read the memory of this process. The call also prevents core dumps
    # that the kernel pipes to a program. RLIMIT_CORE does not limit these core dumps.
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
    """Append a message to `missing` if the kernel refuses the mechanism. Other errors are raised."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0)
        if reason is None:
            raise
        missing.append(f"{name} is missing: {reason}")


def _reset_signals() -> None:
    """Remove the handlers of all signals, because a handler cannot return without the system call rt_sigreturn."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _drop_capabilities() -> None:
    """Drop all capabilities of this process."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    with suppress(OSError):  # refused on unknown architectures, and if there is nothing to drop
        call("capset", ctypes.byref(header), ctypes.byref(nothing))


def _close_others(keep: Collection[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in {0, 1, 2}.difference(keep):
        os.dup2(nothing, standard)
    for entry in [*_DESCRIPTORS.iterdir()]:
        if (descriptor := int(entry.name)) > 2 and descriptor not in keep:
            # closerange ignores closed descriptors. The list contains the descriptor of the listing itself.
            os.closerange(descriptor, descriptor + 1)
