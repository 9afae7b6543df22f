"""Byte messages between a process and the workers that it starts.

A worker runs a separate module (see `mindie_mm.processes.child`), so it never imports the caller's `__main__`. It
inherits one end of a socket pair. A message consists of a 4-byte big-endian length and that number of bytes, as in
`multiprocessing.connection.Connection`. The worker uses a blocking Connection, and the parent uses asyncio streams. The
kernel closes the sockets of a dead process. If one end is closed, the process at that end has therefore died or closed
it on purpose.
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
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakSet

import msgspec

from mindie_mm import logs
from mindie_mm.errors import InputError, MindieMMError, ProcessDied, error_name, error_named, os_errors_as
from mindie_mm.processes import faults, standard_streams
from mindie_mm.processes.interpreter import interpreter
from mindie_mm.settings.environment import keep_python_path

T = TypeVar("T")

MAX_MESSAGE_BYTES = 2**31 - 1
"""Maximum size of a message in bytes: the largest value of the 4-byte length."""

CLOSE_TIMEOUT_S = 2.0
"""Maximum time in seconds that `close` waits until the peer has read all messages, before it aborts the channel."""

PATIENCE_S = 2.0
"""Maximum time in seconds that a worker may take to exit before it gets SIGTERM, and again before it gets SIGKILL."""

_LENGTH = struct.Struct("!i")


class Failure(msgspec.Struct, frozen=True, tag="failed"):
    """An error that is sent to another process."""

    name: str
    """Name of the error's class, or of its nearest base class in mindie_mm.errors."""
    message: str
    param: str | None = None
    """`param` of an InputError."""

    @classmethod
    def of(cls, error: MindieMMError) -> Self:
        """Return the message for `error`."""
        return cls(error_name(error), str(error), error.param if isinstance(error, InputError) else None)

    def exception(self) -> MindieMMError:
        """Recreate the error."""
        return error_named(self.name, self.message, self.param)


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Notice from a worker that is not ready yet."""

    share: float
    """Finished share of the work that the worker has to do before it is ready, from 0 to 1."""


_sockets: WeakSet[socket.socket] = WeakSet()
"""Sockets of the channels that are open in this process."""


def _close_in_child() -> None:
    """Close the channels in a forked process. Its copies would prevent peers from noticing that the parent has died."""
    for sock in list(_sockets):
        if sock.fileno() >= 0:
            os.close(sock.detach())  # uvloop does not allow `sock.close()`


os.register_at_fork(after_in_child=_close_in_child)
keep_python_path()


def spawn(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that calls `module.main(channel, lifeline, *arguments)`.

    If a standard stream is closed in this process, the worker gets /dev/null instead.

    Args:
        module: Name of the module.
        arguments: Arguments of its `main`.
        environment: Environment of the worker. None means the environment of this process.
        descriptors: Open files that the worker inherits under the same numbers.

    Returns:
        The process, and this process's end of the channel.

    Raises:
        ProcessDied: The path of the Python interpreter is unknown, or it is a frozen application.
        OSError: The process cannot be started.

    """
    python = interpreter()
    standard_streams.open_missing()  # otherwise the channel may get descriptor 1 or 2, and libraries may print to it
    ours, theirs = socket_pair()
    with theirs:
        log_settings = msgspec.json.encode(logs.current()).decode()
        command = [
            python,
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


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel. They are closed in a process that is forked from this process."""
    ours, theirs = socket.socketpair()
    _sockets.update((ours, theirs))
    return ours, theirs


async def exited(process: Process, timeout_s: float) -> int | None:
    """Return the exit status of `process`, or None if it is still running after `timeout_s`.

    This function uses no thread, because no thread can be started at interpreter exit.
    """
    deadline = time.monotonic() + timeout_s
    # Poll, because kernels before 5.3, as on older Ascend hosts, have no pidfd.
    while (status := process.poll()) is None and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return status


async def open_channel(sock: socket.socket) -> Channel:
    """Return a channel over the parent's socket `sock`. The channel owns the socket from then on."""
    reader, writer = await asyncio.open_connection(sock=sock)
    return Channel(reader, writer, sock)


class Channel:
    """The parent's end of a channel. Only one task may receive. Any task may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sock: socket.socket) -> None:
        """Wrap a connection. Callers use `open_channel` instead."""
        self._reader = reader
        self._writer = writer
        self._sock = sock

    def send(self, message: bytes) -> None:
        """Queue `message`. If the peer is dead, the message is dropped, and `recv` raises EOFError."""
        assert len(message) <= MAX_MESSAGE_BYTES, len(message)
        if self._writer.is_closing():  # uvloop raises RuntimeError, while asyncio drops the message
            return
        self._writer.writelines((_LENGTH.pack(len(message)), message))

    def send_with(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Send `message` together with open files. The peer receives the files with the 4-byte length of the message.

        If the peer is dead, or has not read earlier messages, the message is dropped, and `recv` raises EOFError.
        """
        if self._writer.is_closing():
            return
        transport = self._writer.transport
        try:
            if transport.get_write_buffer_size() == 0:
                data = _LENGTH.pack(len(message)) + message
                if rest := data[socket.send_fds(self._sock, [data], descriptors) :]:
                    self._writer.write(rest)
                return
        except (ConnectionError, BlockingIOError):
            pass
        transport.abort()

    async def recv(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        """Return the next message.

        Raises:
            EOFError: The peer is gone.
            ValueError: The message is longer than `max_bytes`. After that, no more messages can be received.

        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if not 0 <= length <= max_bytes:
                raise ValueError(f"a message has {length} bytes; the limit is {max_bytes}")
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the peer closed the connection") from error

    async def close(self) -> None:
        """Close this end. The worker reads the remaining messages and exits.

        If a worker hangs and does not read its messages, they are dropped.
        """
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except ConnectionError:
            pass  # the peer died first


class Process(Protocol):
    """A child process of this process, with the part of subprocess.Popen that `Child` uses."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def returncode(self) -> int | None:
        """Exit status, which `poll` and `wait` set. If a signal ended the process, it is the negated signal number."""

    def poll(self) -> int | None:
        """Return the exit status, or None if the process is running."""

    def wait(self) -> int:
        """Wait until the process ends. Return the exit status."""

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""


class Child:
    """A worker process and its channel."""

    def __init__(self, process: Process, channel: Channel) -> None:
        """Wrap a process and its channel. Callers use `start` instead."""
        self._process = process
        self.channel = channel

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> Self:
        """Start a worker as `spawn` does. Raise ProcessDied if it cannot be started."""
        with os_errors_as(ProcessDied, f"{module} cannot be started with sys.executable ({sys.executable})"):
            process, sock = spawn(module, *arguments, environment=environment, descriptors=descriptors)
        return await cls.adopt(process, sock)

    @classmethod
    async def adopt(cls, process: Process, sock: socket.socket) -> Self:
        """Return a worker that is already running. `sock` is this process's end of its channel."""
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
        """Exit status. If a signal ended the process, it is the negated signal number. None while the process runs."""
        return self._process.returncode

    async def ready(self, kind: type[T], what: str, loading: Callable[[float], object] | None = None) -> T:
        """Return the worker's first message of type `kind`.

        If the worker sends a Failure instead, raise its error. If the worker exits first, raise ProcessDied.

        Args:
            kind: Type of the message.
            what: Name of the worker in error messages.
            loading: Function to call with the share in each Loading that the worker sends before this message.

        """
        try:
            while isinstance(reply := await self._first(kind), Loading):
                if loading is not None:
                    loading(reply.share)
        except EOFError:
            await self.close()
            # sys.executable may be a program that embeds Python.
            by = "" if (self.status or 0) < 0 else f"; it was started with sys.executable, {sys.executable}"
            raise ProcessDied(f"{what} exited with status {self.status} before it was ready{by}") from None
        if isinstance(reply, Failure):
            raise reply.exception()
        return reply

    async def _first(self, kind: type[T]) -> T | Failure | Loading:
        reply: T | Failure | Loading = msgspec.msgpack.decode(await self.channel.recv(), type=kind | Failure | Loading)
        return reply

    def terminate(self) -> None:
        """Send the worker SIGTERM, so that it ends when it has done its work. Reap the process with `close`."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the worker immediately. `recv` then raises EOFError. Reap the process with `end`."""
        self._process.kill()

    async def close(self) -> None:
        """Close the channel, so that the worker exits, and reap it. Kill the worker if it does not exit. Idempotent."""
        await self.channel.close()
        for insistence in (self._process.terminate, self._process.kill):
            if await exited(self._process, PATIENCE_S) is not None:
                return
            insistence()
        await exited(self._process, PATIENCE_S)


class ChildChannel:
    """The worker's end of a channel, with blocking calls. It is a context manager."""

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
        """Wait for up to `timeout_s` seconds until `recv` would return or raise EOFError without waiting.

        Return whether it would. If `timeout_s` is None, there is no time limit.
        """
        return self._connection.poll(timeout_s)

    def fileno(self) -> int:
        """Return the file descriptor of the channel, for use with select."""
        return self._connection.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


class Lifeline:
    """A thread that exits this process as soon as its parent is gone or has closed the channel.

    Without this thread, a worker might continue for minutes before it reads the channel again, although its answer is
    no longer needed. If there are several channels, the thread exits the process when any of them is closed.
    """

    def __init__(self, *channels: ChildChannel) -> None:
        self._descriptors = [os.dup(channel.fileno()) for channel in channels]
        self._lock = Lock()
        self._actions: list[Callable[[], object]] = []
        self._left, self._leaving = os.pipe2(os.O_CLOEXEC)
        """Pipe whose write end `leave` closes to wake the thread."""
        self._thread = Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def hold(self, make: Callable[[], T], remove: Callable[[T], None]) -> T:
        """Return the result of `make`. If the thread exits the process, it first calls `remove` with this result.

        A lock prevents the thread from exiting the process after `make`, but before `remove` is registered.
        """
        with self._lock:
            result = make()
            self._actions.append(lambda: remove(result))
        return result

    def before_end(self, action: Callable[[], object]) -> None:
        """Register an action that the thread calls before it exits the process."""
        with self._lock:
            self._actions.append(action)

    def leave(self) -> None:
        """Stop the thread. A process that forks must call this, because it must not have another thread.

        A forked process then has no copies of the channels, so that peers notice when this process dies.
        """
        os.close(self._leaving)
        self._thread.join()
        os.close(self._left)
        while self._descriptors:
            os.close(self._descriptors.pop())

    def end(self) -> None:
        """Call this method when the process has done its work.

        If the parent is gone, wait while the thread runs the registered actions and exits the process. After `leave`,
        this method does nothing.
        """
        if self._descriptors and self._hung_up(0):
            self._thread.join()

    def _hung_up(self, timeout_ms: int | None) -> bool:
        """Wait for at most `timeout_ms` until a peer is gone or `leave` is called. Return whether a peer is gone."""
        hangup = select.poll()
        for descriptor in (*self._descriptors, self._left):
            hangup.register(descriptor, 0)  # poll always reports POLLHUP, and needs no other events
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
