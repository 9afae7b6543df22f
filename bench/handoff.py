"""Handing an array from one process to another: the arena, pickle over a pipe, a fresh SharedMemory per array.

    python -m bench.handoff

Every method runs the same cycle, in a loop of its own, between the same kind of two processes:

    result    the producer computes its result (here it copies a source array) into memory that is faulted in: with
              "arena, in place" that is the block itself, else an array that the producer keeps and reuses
    hand over words, a segment's name, or the pickled array go over a pipe; a fresh segment, and the block of "arena,
              copied in", are allocated and filled from the producer's array first
    read      the consumer copies it all, once, into a buffer that it keeps: what a copy to a device reads
    free      the consumer answers, the producer frees the block or unlinks the segment

Two times are taken, neither with the first step, which costs the same everywhere; allocating the block in place is in
both. `hand over`: from a finished result until the consumer has an array of it. `whole`: on through the consumer's one
copy and the free, until the producer can hand over the next one; it cannot be less than one memcpy.
"""

from __future__ import annotations

import os
import statistics
import struct
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.shm import Arena, ArraySpec, Ref, View, attach, free

MB = 1 << 20
SIZES_MB = (1, 4, 20, 80)
REPEATS = 40
WORDS = struct.Struct("<qq")

Bytes = NDArray[np.uint8]


class Method(ABC):
    """Both halves of one way to hand an array over; made once in each process."""

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
    def send(self, pipe: Connection) -> None:
        """Hands the finished result over."""

    @abstractmethod
    def receive(self, pipe: Connection) -> Bytes:
        """The consumer's ndarray."""

    def done(self) -> None:
        """The consumer has copied it."""

    def free(self) -> None:
        """The producer gives the memory back."""

    def close(self) -> None:
        """Ends the producer."""


class ArenaInPlace(Method):
    name = "arena, in place"

    def open(self) -> None:
        self.arena = Arena.create(2 * self.size + MB)
        self.arena.populated.wait()

    def target(self) -> Bytes:
        self.block = self.arena.allocate({"x": ArraySpec((self.size,), "uint8")}, path_file=None)
        return self.block["x"]

    def send(self, pipe: Connection) -> None:
        pipe.send_bytes(WORDS.pack(*self.block.publish().to_words()))

    def receive(self, pipe: Connection) -> Bytes:
        self.view: View = attach(Ref.from_words(*WORDS.unpack(pipe.recv_bytes())))
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

    def send(self, pipe: Connection) -> None:
        super().target()[...] = self.kept
        super().send(pipe)


class Pickled(Method):
    name = "pickle over a pipe"

    def send(self, pipe: Connection) -> None:
        pipe.send(self.kept)

    def receive(self, pipe: Connection) -> Bytes:
        array: Bytes = pipe.recv()
        return array


class FreshSegment(Method):
    name = "fresh SharedMemory"

    def send(self, pipe: Connection) -> None:
        self.segment = SharedMemory(create=True, size=self.size)
        np.ndarray((self.size,), np.uint8, self.segment.buf)[...] = self.kept
        pipe.send_bytes(self.segment.name.encode())

    def receive(self, pipe: Connection) -> Bytes:
        self.segment = SharedMemory(pipe.recv_bytes().decode())
        return np.ndarray((self.size,), np.uint8, self.segment.buf)

    def done(self) -> None:
        self.segment.close()

    def free(self) -> None:
        self.segment.close()
        self.segment.unlink()


METHODS: tuple[type[Method], ...] = (ArenaInPlace, ArenaCopiedIn, Pickled, FreshSegment)


@dataclass(frozen=True, slots=True)
class Timing:
    """One method at one size: medians, and deciles of the whole, in ms."""

    method: str
    size_mb: int
    repeats: int
    hand_over_ms: float
    whole_ms: float
    whole_p10_ms: float
    whole_p90_ms: float


def consume(pipe: Connection, method_class: type[Method], size: int, checksum: int, repeats: int) -> None:
    """The other process."""
    method = method_class(size)
    kept = np.ones(size, np.uint8)
    for _ in range(repeats):
        array = method.receive(pipe)
        received = time.perf_counter()  # on Linux the same clock in every process
        np.copyto(kept, array)
        del array
        method.done()
        pipe.send(received)
    pipe.send(int(kept.sum(dtype=np.int64)) == checksum)


def measure(method_class: type[Method], size_mb: int, repeats: int) -> Timing:
    size, warm_up = size_mb * MB, 3
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    context = get_context("spawn")
    pipe, other = context.Pipe()
    arguments = (other, method_class, size, int(source.sum(dtype=np.int64)), warm_up + repeats)
    consumer = context.Process(target=consume, args=arguments, daemon=True)
    consumer.start()
    other.close()
    method = method_class(size)
    method.open()
    handed, whole = [], []
    try:
        for _ in range(warm_up + repeats):
            start = time.perf_counter()
            target = method.target()
            allocated = time.perf_counter()
            target[...] = source
            written = time.perf_counter()
            method.send(pipe)
            received = pipe.recv()
            method.free()
            handed.append(1e3 * (received - written + allocated - start))
            whole.append(1e3 * (time.perf_counter() - written + allocated - start))
        if not pipe.recv():
            raise RuntimeError(f"{method.name}: the consumer read other bytes than were sent")
    finally:
        method.close()
    consumer.join()
    handed, whole = handed[warm_up:], whole[warm_up:]
    deciles = statistics.quantiles(whole, n=10)
    medians = statistics.median(handed), statistics.median(whole)
    return Timing(method.name, size_mb, repeats, *medians, deciles[0], deciles[-1])


def copy_ms(size_mb: int, repeats: int) -> float:
    """One memcpy within one process, both sides faulted in: the consumer's read alone."""
    source, target = np.ones(size_mb * MB, np.uint8), np.ones(size_mb * MB, np.uint8)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def run(repeats: int) -> dict[str, Any]:
    timings: list[Timing] = []
    ratios: dict[str, dict[str, dict[str, float]]] = {"hand_over": {}, "whole": {}}
    copies = {}
    for size_mb in SIZES_MB:
        few = max(5, repeats // (4 if size_mb > 20 else 1))
        copies[str(size_mb)] = round(copy_ms(size_mb, few), 4)
        rows = [measure(method, size_mb, few) for method in METHODS]
        timings += rows
        first = rows[0]
        ratios["hand_over"][str(size_mb)] = {
            row.method: round(row.hand_over_ms / first.hand_over_ms, 1) for row in rows
        }
        ratios["whole"][str(size_mb)] = {row.method: round(row.whole_ms / first.whole_ms, 1) for row in rows}
        for row in rows:
            print(
                f"{size_mb:3d} MB  {row.method:20s} {row.hand_over_ms:9.3f} ms, whole {row.whole_ms:9.3f} ms",
                flush=True,
            )
    return {
        "what": (__doc__ or "").strip().splitlines()[0],
        "load_average": os.getloadavg()[0],
        "memcpy_ms": copies,
        "timings": [asdict(timing) for timing in timings],
        "times_the_arena_in_place": ratios,
    }


def draw(axis: Any, results: dict[str, Any]) -> None:
    for method in METHODS:
        rows = [row for row in results["timings"] if row["method"] == method.name]
        axis.loglog(
            [row["size_mb"] for row in rows], [row["hand_over_ms"] for row in rows], marker="o", label=method.name
        )
    axis.loglog(SIZES_MB, list(results["memcpy_ms"].values()), "k:", label="one memcpy, for scale")
    axis.set(title="From a finished result to an array of it in another process", xlabel="MB", ylabel="ms, median")
    axis.set_xticks(SIZES_MB, [str(size) for size in SIZES_MB])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()


def main() -> None:
    from bench import report  # late: it imports torch, which the consumers do without

    results = run(REPEATS)
    report.write("handoff", results)
    report.plot("handoff", lambda axis: draw(axis, results))


if __name__ == "__main__":
    main()
