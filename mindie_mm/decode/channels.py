"""Messages with open files beside them, over a pair of stream sockets.

The framing is that of `mindie_mm.ipc`: four bytes of length, then the message. The descriptors travel with the length.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Self

from mindie_mm.ipc import Channel

_LENGTH = struct.Struct("!i")
_MAX_DESCRIPTORS = 2


class SendingChannel(Channel):
    """The tokenizer's end, for asyncio. It sends descriptors and receives none."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sock: socket.socket) -> None:
        """Hold a channel. Use `open` to create one."""
        super().__init__(reader, writer)
        self._sock = sock

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        """Return a channel over `sock`, which the channel then owns."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, sock)

    def send_with(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Send `message` with `descriptors`. The peer must have read all earlier messages.

        A message to a dead peer is dropped, and `recv` raises EOFError.
        """
        try:
            socket.send_fds(self._sock, [_LENGTH.pack(len(message))], descriptors)
        except ConnectionError:
            return
        self._writer.write(message)


class ReceivingChannel:
    """The other end, blocking. It receives descriptors and sends none."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def receive(self) -> tuple[bytes, list[int]]:
        """Return the next message and the descriptors beside it, which the caller closes.

        Raises:
            EOFError: The peer is gone.

        """
        descriptors: list[int] = []
        header = b""
        while len(header) < _LENGTH.size:
            piece, found, _, _ = socket.recv_fds(self.socket, _LENGTH.size - len(header), _MAX_DESCRIPTORS)
            descriptors += found
            if not piece:
                raise EOFError("the peer is gone")
            header += piece
        (length,) = _LENGTH.unpack(header)
        message = bytearray(length)
        view = memoryview(message)
        while view:
            num_bytes = self.socket.recv_into(view)
            if not num_bytes:
                raise EOFError("the peer is gone")
            view = view[num_bytes:]
        return bytes(message), descriptors

    def send(self, message: bytes) -> None:
        """Send `message`. Raise BrokenPipeError if the peer is gone."""
        self.socket.sendall(_LENGTH.pack(len(message)) + message)
