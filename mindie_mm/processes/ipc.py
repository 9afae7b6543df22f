"""Byte messages between a process and the workers that it starts.

A worker runs a separate module (see `mindie_mm.processes.child`), so the caller's `__main__` is never imported again.
It inherits one end of a socket pair. A message is a 4-byte big-endian length and that many bytes, as in
`multiprocessing.connection.Connection`. The worker blocks in a Connection, and the parent awaits in asyncio. The kernel
closes the socket of a dead process, so a closed end means that the peer has died.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any, Self, TypeVar
from weakref import WeakSet

import msgspec

from mindie_mm import logs
from mindie_mm.errors import InputError, MindieMMError, ProcessDied, error_name, error_named, os_errors_as
from mindie_mm.processes import faults, standard_streams
from mindie_mm.settings.environment import keep_python_path

T = TypeVar("T")

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message that the 4-byte length can frame."""

CLOSE_TIMEOUT_S = 2.0
"""Maximum time in seconds that a peer may take to read sent messages before the channel is aborted."""

PATIENCE_S = 2.0
"""Time in seconds that a worker has to exit, and then again after SIGTERM, before it is killed."""

_LENGTH = struct.Struct("!i")


class Failure(msgspec.Struct, frozen=True, tag="failed"):
    """An error that is sent to another process."""

    name: str
    """Name of the nearest class in mindie_mm.errors."""
    message: str
    param: str | None = None
    """`param` of an InputError."""

    @classmethod
    def of(cls, error: MindieMMError) -> Self:
        """Return the message for `error`."""
        return cls(error_name(error), str(error), error.param if isinstance(error, InputError) else None)

    def exception(self) -> MindieMMError:
        """Return the error that this message stands for."""
        return error_named(self.name, self.message, self.param)


_sockets: WeakSet[socket.socket] = WeakSet()
"""Ends of channels that are open in this process."""


def _close_in_child() -> None:
    """Close the channels in a forked process. An open copy would hide the death of the process that owns it."""
    for sock in list(_sockets):
        if sock.fileno() >= 0:
            os.close(sock.detach())  # uvloop prevents `close` of its sockets


os.register_at_fork(after_in_child=_close_in_child)
keep_python_path()


def spawn(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `module.main(channel, lifeline, *arguments)` in a process, and return it with our end of the channel.

    A standard stream that is closed in this process is /dev/null in the worker.

    Args:
        module: Name of the module.
        arguments: Arguments of its `main`.
        environment: Environment of the worker. None: the environment of this process.
        descriptors: Open files that the worker inherits under the same numbers.

    Raises:
        ProcessDied: The path of the Python interpreter is unknown.
        OSError: The process cannot be started.

    """
    interpreter = _interpreter()
    standard_streams.open_missing()  # otherwise the channel may get descriptor 1 or 2, and libraries print into it
    ours, theirs = socket.socketpair()
    _sockets.update((ours, theirs))
    with theirs:
        log_settings = msgspec.json.encode(logs.current()).decode()
        command = [
            interpreter,
            "-P",
            "-m",
            "mindie_mm.processes.child",
            str(theirs.fileno()),
            log_settings,
            module,
            *arguments,
        ]
        nowhere: dict[str, Any] = dict.fromkeys(standard_streams.missing(), subprocess.DEVNULL)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own module
                command, pass_fds=(theirs.fileno(), *descriptors), env=environment, **nowhere
            )
        except BaseException:
            ours.close()
            raise
    faults.point("spawned")
    return process, ours


def _interpreter() -> str:
    """Return the path of this process's Python. Raise ProcessDied if it is unknown."""
    if not sys.executable:
        raise ProcessDied(
            f"no worker process can be started: sys.executable is {sys.executable!r}, as in some programs that "
            "embed Python. Set it to the path of the python of this environment"
        )
    return sys.executable


async def exited(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Return the exit status of `process`, or None if it still runs after `timeout_s`.

    This uses no thread, because none can be started at interpreter exit.
    """
    deadline = time.monotonic() + timeout_s
    # Polling, because kernels before 5.3, as on older Ascend hosts, have no pidfd.
    while (status := process.poll()) is None and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return status


async def open_channel(sock: socket.socket) -> Channel:
    """Return a channel over the parent's socket `sock`, which the channel then owns."""
    reader, writer = await asyncio.open_connection(sock=sock)
    return Channel(reader, writer, sock)


class Channel:
    """The parent's side of a channel. Only one task may receive. Any task may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sock: socket.socket) -> None:
        """Hold a connection. Use `open_channel` to create one."""
        self._reader = reader
        self._writer = writer
        self._sock = sock

    def send(self, message: bytes) -> None:
        """Queue `message`. A message to a dead peer is dropped, and `recv` raises EOFError."""
        assert len(message) <= MAX_MESSAGE_BYTES, len(message)
        self._writer.writelines((_LENGTH.pack(len(message)), message))

    def send_with(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Send `message` together with open files. The peer receives the files with the length of the message.

        The peer must be waiting for it, with room in the socket. A message to a dead peer is dropped.
        """
        if self._writer.is_closing():
            return
        assert self._writer.transport.get_write_buffer_size() == 0, "the peer has not read earlier messages"
        try:
            socket.send_fds(self._sock, [_LENGTH.pack(len(message))], descriptors)
        except ConnectionError:
            return
        self._writer.write(message)

    async def recv(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        """Return the next message.

        Raises:
            EOFError: The peer is gone.
            ValueError: The message is longer than `max_bytes`. Nothing more can be received then.

        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if not 0 <= length <= max_bytes:
                raise ValueError(f"a message has {length} bytes; the limit is {max_bytes}")
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the peer closed the connection") from error

    async def close(self) -> None:
        """Close this end. The worker reads the rest and exits. Messages that a stuck worker leaves are dropped."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except ConnectionError:
            pass  # the peer died first


class Child:
    """A worker process and its channel."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        """Hold a process and its channel. Use `start` to create them."""
        self._process = process
        self.channel = channel

    @classmethod
    async def start(cls, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Self:
        """Start `module` as `spawn` does. Raise ProcessDied if it cannot be started."""
        with os_errors_as(ProcessDied, f"{module} cannot be started with sys.executable ({sys.executable})"):
            process, sock = spawn(module, *arguments, environment=environment)
        try:
            return cls(process, await open_channel(sock))
        except BaseException:
            sock.close()
            process.kill()
            process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal, or None while the process runs."""
        return self._process.returncode

    async def ready(self, kind: type[T], what: str) -> T:
        """Return the worker's first message, a `kind`. `what` names the worker in errors.

        Raise the error of a Failure in its place, or ProcessDied if the worker has ended.
        """
        try:
            reply: T | Failure = msgspec.msgpack.decode(await self.channel.recv(), type=kind | Failure)
        except EOFError:
            await self.end()
            # sys.executable may be a program that embeds Python.
            by = "" if (self.status or 0) < 0 else f"; it was started with sys.executable, {sys.executable}"
            raise ProcessDied(f"{what} exited with status {self.status} before it was ready{by}") from None
        if isinstance(reply, Failure):
            raise reply.exception()
        return reply

    def kill(self) -> None:
        """Kill the worker at once. `recv` then raises EOFError. Reap the process with `end`."""
        self._process.kill()

    async def end(self) -> None:
        """Close the channel, which ends the worker, and reap the process. Kill it if it does not end. Idempotent."""
        await self.channel.close()
        for insistence in (self._process.terminate, self._process.kill):
            if await exited(self._process, PATIENCE_S) is not None:
                return
            insistence()
        await exited(self._process, PATIENCE_S)


class ChildChannel:
    """The worker's side of a channel, with blocking calls. A context manager."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)

    def send(self, message: bytes) -> None:
        """Send `message`. Raise BrokenPipeError if the parent is gone."""
        self._connection.send_bytes(message)

    def recv(self) -> bytes:
        """Return the next message. Raise EOFError if the parent is gone."""
        try:
            return self._connection.recv_bytes()
        except ConnectionError as error:
            raise EOFError("the parent process exited") from error

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Return whether `recv` would return or raise EOFError at once.

        Wait for that up to `timeout_s` seconds, or without limit if it is None.
        """
        return self._connection.poll(timeout_s)

    def fileno(self) -> int:
        """Return the file descriptor, for select."""
        return self._connection.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


class Lifeline:
    """A thread that ends this process at any point once its parent is gone or has closed the channel.

    A worker may need minutes to reach its next read of the channel, and its answer is not needed any more. If there are
    several channels, the end of any of them counts.
    """

    def __init__(self, *channels: ChildChannel) -> None:
        self._descriptors = [os.dup(channel.fileno()) for channel in channels]
        self._lock = Lock()
        self._actions: list[Callable[[], object]] = []
        self._left, self._leaving = os.pipe2(os.O_CLOEXEC)
        """A pipe that `leave` closes, to wake the thread."""
        self._thread = Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def hold(self, make: Callable[[], T], remove: Callable[[T], None]) -> T:
        """Return the result of `make`, and remove it before the process ends. A lock makes sure of the removal."""
        with self._lock:
            made = make()
            self._actions.append(lambda: remove(made))
        return made

    def before_end(self, action: Callable[[], object]) -> None:
        """Call `action` before the process ends."""
        with self._lock:
            self._actions.append(action)

    def leave(self) -> None:
        """End the thread that watches, because a process that forks must have no other thread."""
        os.close(self._leaving)
        self._thread.join()

    def end(self) -> None:
        """Finish a process that has done its work. If the parent is gone, wait for the actions before the end."""
        if self._hung_up(0):
            self._thread.join()

    def _hung_up(self, timeout_ms: int | None) -> bool:
        """Wait until a peer is gone, or until `leave`. Return whether a peer is gone."""
        hangup = select.poll()
        for descriptor in (*self._descriptors, self._left):
            hangup.register(descriptor, 0)  # POLLHUP is always reported, and nothing else is asked for
        return any(descriptor != self._left for descriptor, _ in hangup.poll(timeout_ms))

    def _watch(self) -> None:
        if not self._hung_up(None):
            return
        with self._lock:
            try:
                faults.point("stopping")
                for action in self._actions:
                    action()
            finally:
                os._exit(0)
