"""Methods of handing over an array that bench/shm.py compares, with their producer's and consumer's sides."""

from __future__ import annotations

import pickle
import socket
import struct
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.shm import Arena, ArraySpec, Ref, View, attach, free

WORDS = struct.Struct("<qq")
LENGTH = struct.Struct("<Q")

Bytes = NDArray[np.uint8]


class Method(ABC):
    """A method of handing over an array. Each of the two processes has an instance and its ends of the channels."""

    name: str

    def __init__(self, size: int) -> None:
        self.size = size

    def open(self) -> None:
        """Set up the producer."""
        self.kept = np.ones(self.size, np.uint8)

    def target(self) -> Bytes:
        """Return the array for the result of the producer."""
        return self.kept

    @abstractmethod
    def send(self, channels: Channels) -> None:
        """Hand over the finished result."""

    @abstractmethod
    def receive(self, channels: Channels) -> Bytes:
        """Return the consumer's array."""

    def done(self) -> None:
        """Finish reading, after the consumer has copied the array."""

    def free(self) -> None:
        """Free the memory in the producer."""

    def close(self) -> None:
        """Close the producer."""


class Channels:
    """One process's ends of the channels."""

    def __init__(self, pipe: Connection, queue: Queue[Any], stream: socket.socket) -> None:
        self.pipe, self.queue, self.stream = pipe, queue, stream


class ArenaInPlace(Method):
    name = "arena, in place"

    def open(self) -> None:
        self.arena = Arena.create(2 * self.size + (1 << 20))
        self.arena.populated.wait()

    def target(self) -> Bytes:
        self.block = self.arena.allocate({"x": ArraySpec((self.size,), "uint8")}, path_file=None)
        return self.block["x"]

    def send(self, channels: Channels) -> None:
        channels.pipe.send_bytes(WORDS.pack(*self.block.publish().to_words()))

    def receive(self, channels: Channels) -> Bytes:
        self.view: View = attach(Ref.from_words(*WORDS.unpack(channels.pipe.recv_bytes())))
        return self.view["x"]

    def done(self) -> None:
        self.view.verify()

    def free(self) -> None:
        free(self.block.ref)

    def close(self) -> None:
        self.arena.close()


class ArenaCopiedIn(ArenaInPlace):
    name = "arena, copied in"

    def open(self) -> None:
        super().open()
        self.kept = np.ones(self.size, np.uint8)

    def target(self) -> Bytes:
        return self.kept

    def send(self, channels: Channels) -> None:
        super().target()[...] = self.kept
        super().send(channels)


class Pickled(Method):
    """A pickle of protocol 5, sent in one message. The two-way pipe of multiprocessing is a pair of Unix sockets."""

    name = "pickle over a pipe"

    def send(self, channels: Channels) -> None:
        channels.pipe.send_bytes(pickle.dumps(self.kept, protocol=5))

    def receive(self, channels: Channels) -> Bytes:
        array: Bytes = pickle.loads(channels.pipe.recv_bytes())  # noqa: S301 - from our own process
        return array


class Queued(Method):
    name = "multiprocessing.Queue"

    def send(self, channels: Channels) -> None:
        channels.queue.put(self.kept)

    def receive(self, channels: Channels) -> Bytes:
        array: Bytes = channels.queue.get()
        return array


class UnixSocket(Method):
    """A message of the array's length and its raw bytes, received into an array that the consumer reuses."""

    name = "unix socket"

    def send(self, channels: Channels) -> None:
        channels.stream.sendall(LENGTH.pack(self.size))
        channels.stream.sendall(self.kept.data)

    def receive(self, channels: Channels) -> Bytes:
        if not hasattr(self, "received"):
            self.received = np.ones(self.size, np.uint8)
        (left,) = LENGTH.unpack(channels.stream.recv(LENGTH.size, socket.MSG_WAITALL))
        view = self.received.data
        while left:
            left -= channels.stream.recv_into(view[self.size - left :])
        return self.received


class FreshSegment(Method):
    """A new segment for each array, as in MindIE and SGLang."""

    name = "fresh SharedMemory"

    def send(self, channels: Channels) -> None:
        self.segment = SharedMemory(create=True, size=self.size)
        np.ndarray((self.size,), np.uint8, self.segment.buf)[...] = self.kept
        channels.pipe.send_bytes(self.segment.name.encode())

    def receive(self, channels: Channels) -> Bytes:
        self.segment = SharedMemory(channels.pipe.recv_bytes().decode())
        return np.ndarray((self.size,), np.uint8, self.segment.buf)

    def done(self) -> None:
        self.segment.close()

    def free(self) -> None:
        self.segment.close()
        self.segment.unlink()


METHODS: tuple[type[Method], ...] = (ArenaInPlace, ArenaCopiedIn, Pickled, Queued, UnixSocket, FreshSegment)
