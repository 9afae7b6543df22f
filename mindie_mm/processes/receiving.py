"""A worker's end of a channel through which files can be sent (`mindie_mm.processes.ipc.Channel.send_with`)."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("!i")
_MAX_DESCRIPTORS = 8


class ReceivingChannel:
    """Blocking end of a channel. It receives messages with descriptors, and sends messages without descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def receive(self) -> tuple[bytes, list[int]]:
        """Return the next message and its descriptors. The caller closes the descriptors.

        Raises:
            EOFError: The peer has closed the channel.

        """
        descriptors: list[int] = []
        header = b""
        while len(header) < _LENGTH.size:
            piece, received, _, _ = socket.recv_fds(self.socket, _LENGTH.size - len(header), _MAX_DESCRIPTORS)
            descriptors += received
            if not piece:
                raise EOFError("the peer closed the connection")
            header += piece
        (length,) = _LENGTH.unpack(header)
        message = bytearray(length)
        view = memoryview(message)
        while view:
            num_bytes = self.socket.recv_into(view)
            if not num_bytes:
                raise EOFError("the peer closed the connection")
            view = view[num_bytes:]
        return bytes(message), descriptors

    def send(self, message: bytes) -> None:
        """Send `message`. Raise BrokenPipeError if the peer has closed the channel."""
        self.socket.sendall(_LENGTH.pack(len(message)) + message)
