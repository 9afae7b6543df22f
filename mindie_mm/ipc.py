"""Byte messages between a process and the workers that it starts.

A worker is a module of its own (`python -m module`), so the caller's `__main__` is never imported again. It inherits
one end of a socket pair. A message is a 4-byte big-endian length and that many bytes, which is how
`multiprocessing.connection.Connection` frames them too: the worker blocks in a Connection, the parent awaits in
asyncio. A closed end is the death of the peer, however it died: the kernel closes sockets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message that the 4-byte length can frame."""

CLOSE_TIMEOUT_S = 2.0
"""How long a peer may take to read what was sent before the channel is closed under it."""

_LENGTH = struct.Struct("!i")


def spawn(module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts `python -m module FD arguments...` and returns it with the parent's end of the socket pair.

    FD is the number of the worker's inherited end, for `ChildChannel(FD)`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", module, str(theirs.fileno()), *arguments]
        try:
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))  # noqa: S603 - our own module
        except BaseException:
            ours.close()
            raise
    return process, ours


async def exited(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit status of `process`, None if it runs on after `timeout_s`. No thread: at exit there are none."""
    if (status := process.poll()) is not None:
        return status
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)  # not reaped yet, so the number is still its own
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
        return process.wait()
    except TimeoutError:
        return None
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def open_channel(sock: socket.socket) -> Channel:
    """The parent's side of `sock`, which the channel owns from here on."""
    reader, writer = await asyncio.open_connection(sock=sock)
    return Channel(reader, writer)


class Channel:
    """The parent's side. One task receives; any may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: bytes) -> None:
        """Queues `message`; to a dead peer it is dropped, and `recv` says so with EOFError."""
        assert len(message) <= MAX_MESSAGE_BYTES, len(message)
        self._writer.writelines((_LENGTH.pack(len(message)), message))

    async def recv(self) -> bytes:
        """The next message. EOFError when the peer is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the peer is gone") from error

    async def close(self) -> None:
        """Closes this end; the worker reads its stream to the end and exits. What a stuck one leaves is dropped."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except ConnectionError:
            pass  # the peer died first: closed is closed


class ChildChannel:
    """The worker's side, blocking. A context manager."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)

    def send(self, message: bytes) -> None:
        """Sends `message`. BrokenPipeError when the parent is gone."""
        self._connection.send_bytes(message)

    def recv(self) -> bytes:
        """The next message. EOFError when the parent is gone."""
        try:
            return self._connection.recv_bytes()
        except ConnectionError as error:
            raise EOFError("the parent is gone") from error

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Whether `recv` would return, or raise EOFError, at once; waits for that up to `timeout_s`, None: for ever."""
        return self._connection.poll(timeout_s)

    def fileno(self) -> int:
        """The file descriptor, for select."""
        return self._connection.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
