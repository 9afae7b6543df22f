"""Copies of this process that become workers.

A copy has the modules that this process has imported, so it is ready within milliseconds. The process that makes a
copy must have a single thread, because a copy has only the thread that makes it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

import msgspec

from mindie_mm import logs
from mindie_mm.processes import child, standard_streams
from mindie_mm.processes.ipc import Child
from mindie_mm.processes.receiving import ReceivingChannel
from mindie_mm.settings.environment import replace_environment

_CLONE_PARENT = 0x00008000
_CLONE_CHILD_CLEARTID = 0x00200000
_CLONE_CHILD_SETTID = 0x01000000
_PR_GET_TID_ADDRESS = 40
_CLONE_NUMBERS = {"x86_64": 56, "aarch64": 220}
"""Numbers of the system call clone, by the architecture's name in `uname -m`."""


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """A request for a worker. Its descriptors are the worker's channel, standard streams and working directory."""

    module: str
    """Module whose `main` the worker calls, as in `ipc.spawn`."""
    arguments: list[bytes]
    """Arguments of `main`, encoded for the file system."""
    environment: dict[bytes, bytes]
    log_settings: logs.LogSettings
    spare: bool = False
    """True if the worker first makes a copy of itself, for a worker of its own (`start_spare`)."""

    @classmethod
    def of(cls, module: str, arguments: Sequence[str], environment: Mapping[str, str], *, spare: bool = False) -> Fork:
        """Return the request. `environment` is the worker's environment."""
        encoded = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        return cls(module, [*map(os.fsencode, arguments)], encoded, logs.current(), spare)


class ForkedProcess:
    """A child process that was not started by subprocess. It has the same methods as subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None if the process is running."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait until the process ends. Return the exit status."""
        status = self._wait(0)
        assert status is not None
        return status

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:  # the id belongs to the process until its status is read
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # the program waits for all its children, and the status is lost
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


@contextmanager
def worker_files() -> Iterator[list[int]]:
    """Yield the descriptors of this process's standard streams and working directory, for a `Fork`.

    A stream that was closed when this process started is replaced by /dev/null, as in `ipc.spawn`.
    """
    standard_streams.open_missing()
    with ExitStack() as opened:
        null = os.open(os.devnull, os.O_RDWR)
        opened.callback(os.close, null)
        folder = os.open(".", os.O_PATH)
        opened.callback(os.close, folder)
        missing = standard_streams.missing()
        yield [*(null if name in missing else number for number, name in enumerate(standard_streams.NAMES)), folder]


def fork_sibling() -> int:
    """Fork this process, as os.fork does, but make the copy a child of this process's parent.

    The parent can then wait for the copy and signal it, as if it had started the copy.

    Returns:
        0 in the copy, and the id of the copy in this process.

    Raises:
        OSError: The kernel refuses, or the architecture is not supported.

    """
    python = ctypes.PyDLL(None, use_errno=True)  # keeps the global interpreter lock during the calls
    python.syscall.restype = ctypes.c_long
    python.PyOS_BeforeFork()
    pid = _clone(python)
    error = ctypes.get_errno()
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def _clone(python: ctypes.PyDLL) -> int:
    """Make the system call. As in the C library's fork, the kernel stores the thread id of the copy for the library."""
    address = ctypes.c_void_p()
    flags = _CLONE_PARENT
    if python.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) == 0 and address:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    nothing = ctypes.c_void_p()
    machine = platform.machine()
    places = (address, nothing) if machine == "x86_64" else (nothing, address)  # the child's id, thread-local storage
    number = ctypes.c_long(_CLONE_NUMBERS.get(machine, -1))  # -1 fails with ENOSYS
    pid: int = python.syscall(number, ctypes.c_ulong(flags), nothing, nothing, *places)
    return pid


def become(fork: Fork, descriptors: Sequence[int], imported: Mapping[str, str]) -> NoReturn:
    """Run as a worker in a copy, and exit.

    Args:
        fork: Request for the worker.
        descriptors: Descriptors of the request. This call owns them.
        imported: Environment variables that imported modules have set.

    """
    channel, *streams, folder = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with suppress(PermissionError):  # the fork server has the same directory, unless its parent has changed it
        os.fchdir(folder)
    os.close(folder)
    if fork.spare:
        _make_spare(channel, imported)
    _run(channel, fork, imported)


def _run(channel: int, fork: Fork, imported: Mapping[str, str]) -> NoReturn:
    replace_environment(fork.environment, imported)
    arguments = [*map(os.fsdecode, fork.arguments)]
    child.run(channel, fork.log_settings, fork.module, arguments)
    sys.exit()


_spare: tuple[ForkedProcess, socket.socket] | None = None
"""Copy of this process that waits to become a worker, and this process's end of its channel."""


def _make_spare(channel: int, imported: Mapping[str, str]) -> None:
    """Fork a copy that waits on its own channel until `start_spare` uses it, or until this process ends.

    The copy closes `channel`, which is this process's.
    """
    global _spare  # noqa: PLW0603 - a process has only one spare copy
    ours, theirs = socket.socketpair()
    if pid := os.fork():
        theirs.close()
        _spare = ForkedProcess(pid), ours
        return
    ours.close()
    os.close(channel)
    try:
        message, _ = ReceivingChannel(theirs).receive()
    except (EOFError, ConnectionError):
        os._exit(0)
    _run(theirs.detach(), msgspec.msgpack.decode(message, type=Fork), imported)


async def start_spare(module: str, *arguments: str, environment: Mapping[str, str]) -> Child:
    """Start a worker as `Child.start` does. If this process has a spare copy, the copy becomes the worker."""
    global _spare
    if _spare is None:
        return await Child.start(module, *arguments, environment=environment)
    (process, sock), _spare = _spare, None
    worker = await Child.adopt(process, sock)
    worker.channel.send(msgspec.msgpack.encode(Fork.of(module, arguments, environment)))
    return worker
