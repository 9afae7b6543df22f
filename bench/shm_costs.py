"""Measurement of the microseconds that each step of an arena takes in one process, and of the readers' memory."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from bench.shm_methods import WORDS
from mindie_mm.shm import Arena, ArraySpec, Ref, attach, free

MB = 1 << 20
CALLS = 5000
ROUNDS = 9


def costs() -> dict[str, float | dict[str, float]]:
    """Measure, print and return all costs."""
    with Arena.create(256 * MB) as arena, tempfile.TemporaryDirectory() as folder:
        arena.populated.wait()
        path_file = Path(folder) / "shm_name.txt"
        figures: dict[str, float | dict[str, float]] = {
            "allocate_and_give_up_us": per_call(lambda: give_up(arena, None)),
            "allocate_and_give_up_with_ledger_line_us": per_call(lambda: give_up(arena, path_file)),
            "allocate_publish_free_take_back_us": per_call(lambda: cycle(arena)),
            "reference_us": {f"{size} MB": reference_us(arena, int(size * MB)) for size in (0.1, 1, 20, 80)},
            "attach_us": attach_us(arena),
            "fstat_us": fstat_us(arena),
            "waking_a_reader_us": waking_us(),
            "readers_pss_mb": {f"{count} readers": readers_pss_mb(arena, count) for count in (1, 4)},
        }
    for name, value in figures.items():
        print(f"{name}: {value}", flush=True)
    return figures


def per_call(call: Callable[[], object]) -> float:
    """Return the microseconds of a call, as the median over several rounds. CPU time excludes other programs."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        times.append((time.process_time() - start) / CALLS)
    return round(1e6 * statistics.median(times), 2)


SPECS = {"x": ArraySpec((1500, 588), "uint8")}


def give_up(arena: Arena, path_file: Path | None) -> None:
    with arena.allocate(SPECS, path_file=path_file):
        pass


def cycle(arena: Arena) -> None:
    with arena.allocate(SPECS, path_file=None) as block:
        free(block.publish())


def reference_us(arena: Arena, size: int) -> float:
    """Return the time to send a reference through a pipe and get its array, within one process.

    The time includes encoding, writing, reading, decoding and attaching, but no wake-up.
    """
    with arena.allocate({"x": ArraySpec((size,), "uint8")}, path_file=None) as block:
        ref = block.publish()
    reader, writer = os.pipe()
    try:

        def hand_over() -> None:
            os.write(writer, WORDS.pack(*ref.to_words()))
            attach(Ref.from_words(*WORDS.unpack(os.read(reader, WORDS.size))))["x"]

        return per_call(hand_over)
    finally:
        os.close(reader)
        os.close(writer)
        free(ref)


def attach_us(arena: Arena) -> float:
    with arena.allocate(SPECS, path_file=None) as block:
        ref = block.publish()
    try:
        return per_call(lambda: attach(ref))
    finally:
        free(ref)


def fstat_us(arena: Arena) -> float:
    with arena.path.open("rb") as file:
        descriptor = file.fileno()
        return per_call(lambda: os.fstat(descriptor))


def waking_us() -> float:
    """Return the time from a write to a pipe until a process that waits at the other end has read the data."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    sleeper = context.Process(target=_sleep, args=(theirs,), daemon=True)
    sleeper.start()
    times = []
    for _ in range(300):
        time.sleep(0.002)  # ensures that the reader sleeps
        start = time.perf_counter()
        ours.send_bytes(b"words of 16 byte")
        times.append(ours.recv() - start)
    ours.send_bytes(b"")
    sleeper.join()
    return round(1e6 * statistics.median(times), 1)


def _sleep(pipe: Connection) -> None:
    while pipe.recv_bytes():
        pipe.send(time.perf_counter())


def readers_pss_mb(arena: Arena, count: int) -> float:
    """Return the megabytes of an arena that its owner and `count` readers of an 80 MB block map in total.

    Each page counts once.
    """
    with arena.allocate({"x": ArraySpec((80 * MB,), "uint8")}, path_file=None) as block:
        block["x"][...] = 1
        ref = block.publish()
    context = get_context("spawn")
    pipes, readers = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        readers.append(context.Process(target=_read, args=(theirs, ref.to_words()), daemon=True))
        readers[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    inode = arena.path.stat().st_ino
    pids = [os.getpid(), *(reader.pid or 0 for reader in readers)]
    while any(_kilobytes("Rss", pid, inode) * 1024 < arena.capacity_bytes for pid in pids):
        time.sleep(0.05)  # readers map the whole arena in the background
    held = sum(_kilobytes("Pss", pid, inode) for pid in pids)
    for pipe, reader in zip(pipes, readers, strict=True):
        pipe.send(None)
        reader.join()
    free(ref)
    return round(held / 1024, 1)


def _read(pipe: Connection, words: tuple[int, int]) -> None:
    total = int(attach(Ref.from_words(*words))["x"].sum())
    pipe.send(total)
    pipe.recv()


def _kilobytes(what: str, pid: int, inode: int) -> int:
    """Return the Rss or Pss of a file that a process maps. Pss divides each page among the processes that map it."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):  # address, permissions, offset, device, inode
            inside = fields[4] == str(inode)
        elif inside and line.startswith(f"{what}:"):
            total += int(fields[1])
    return total
