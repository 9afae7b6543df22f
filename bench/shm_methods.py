"""The ways to hand an array over that bench/shm.py compares: both halves of each, one in each process."""

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
    """One way; an object of it in each process, over channels that both were given."""

    name: str

    def __init__(self, size: int) -> None:
        self.size = size

    def open(self) -> None:
        """Sets the producer up."""
        self.kept = np.ones(self.size, np.uint8)

    def target(self) -> Bytes:
        """Where the producer's result is to be written."""
        return self.kept

    @abstractmethod
    def send(self, channels: Channels) -> None:
        """Hands the finished result over."""

    @abstractmethod
    def receive(self, channels: Channels) -> Bytes:
        """The consumer's array."""

    def done(self) -> None:
        """The consumer has copied it."""

    def free(self) -> None:
        """The producer gives the memory back."""

    def close(self) -> None:
        """Ends the producer."""


class Channels:
    """One process's ends of what the methods send through."""

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
    """Protocol 5 in one piece; multiprocessing's two-way pipe is a pair of unix sockets."""

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
    """Raw bytes behind their length, received into an array that the consumer keeps."""

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
    """What MindIE and SGLang do: a segment for each tensor."""

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
