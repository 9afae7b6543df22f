"""Stress test of shared-memory blocks: data that a view's `verify` accepts is never corrupt.

    python -m tools.shm_stress --cycles 1000000 --readers 8

One writer publishes blocks. For each block, one of many reader processes attaches, copies and frees the block. The
content of a block depends only on its reference: each position has a random number plus a number that is computed from
the reference. Content of another block is therefore always detected. Some readers are slow, and the writer frees some
blocks and reuses their memory while a reader copies them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from mindie_mm.errors import StaleReference
from mindie_mm.shm import Arena, ArraySpec, Ref, attach, free, release

MAX_ARRAY_BYTES = 400_000
_PLACES = np.random.default_rng(5).integers(0, 1 << 64, MAX_ARRAY_BYTES // 8 + 2, dtype=np.uint64)
_MESSAGE = struct.Struct("<qqq")  # name word, shape word, number of the path file or -1

_SLOW_SHARE = 1 / 16
_SLOW_S = 0.001
_EARLY_SHARE = 1 / 8
"""Share of the blocks that the writer frees before or while they are read."""
_ABANDONED_SHARE = 1 / 32
_PATH_FILE_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of published blocks by result. The first three and `torn` add up to all blocks."""

    fresh: int
    """Blocks that were verified after the copy, and whose copy is correct."""
    stale: int
    """Blocks that were freed before they were attached."""
    stale_after_copy: int
    """Blocks that were freed while they were copied, so that `verify` raised StaleReference."""
    mixed: int
    """Blocks among `stale_after_copy` whose copy is not correct. `verify` exists to detect them."""
    torn: int
    """Blocks that were verified, but whose copy is not correct. Must be 0."""
    in_pieces: int = 0
    """Blocks, with any result, that consisted of several pieces."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Counts)))


def stress(cycles: int, readers: int, *, capacity_bytes: int = 4 << 20, seed: int = 3) -> Counts:
    """Publish `cycles` blocks to `readers` processes, and return the counts.

    Raises:
        RuntimeError: A reader died, or a block or a path file is left at the end.

    """
    draw = random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mindie_mm-stress-")))
        processes = [_start_reader(stack, folder, seed + 1 + number) for number in range(readers)]
        with Arena.create(capacity_bytes) as arena:
            pinned = _break_up(arena)
            in_pieces = _write(arena, processes, folder, cycles, draw)
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
            counts = sum((_counts(process) for process in processes), Counts(0, 0, 0, 0, 0, in_pieces))
            for ref in pinned:
                free(ref)
            if arena.num_blocks:
                raise RuntimeError(f"{arena.num_blocks} blocks were not freed")
        if left := list(folder.iterdir()):
            raise RuntimeError(f"{len(left)} path files were not removed")
    return counts


def _break_up(arena: Arena) -> list[Ref]:
    """Fragment the arena with permanent blocks every 192 KiB, so that larger blocks consist of several pieces."""
    refs = []
    specs = {"x": ArraySpec((60 << 10,), "uint8")}
    while arena.used_bytes + (64 << 10) <= arena.capacity_bytes:
        with arena.allocate(specs, path_file=None, timeout_s=0) as block:
            refs.append(block.publish())
    for place, ref in enumerate(refs):
        if place % 4:
            free(ref)
    return refs[::4]


def _start_reader(stack: ExitStack, folder: Path, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tools.shm_stress", "--read", str(folder), "--seed", str(seed)]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))  # noqa: S603
    stack.callback(process.kill)
    return process


def _write(
    arena: Arena, processes: list[subprocess.Popen[bytes]], folder: Path, cycles: int, draw: random.Random
) -> int:
    """Publish the blocks and send each of them to one reader. Free some of them early, while the reader may use them.

    Return the number of blocks with several pieces.
    """
    in_pieces = 0
    pipes = [process.stdin.fileno() for process in processes if process.stdin is not None]
    doomed: deque[Ref] = deque()
    for cycle in range(cycles):
        path_number = cycle if draw.random() < _PATH_FILE_SHARE else -1
        path_file = None if path_number < 0 else folder / f"{path_number}.txt"
        # Sizes from a few bytes to hundreds of KiB, uniform in their logarithm.
        size = int(8 * 2 ** (draw.random() * 15.6))
        specs = {"x": ArraySpec((size,), "uint8"), "y": ArraySpec((3,), "uint64")}
        if draw.random() < _ABANDONED_SHARE:
            with arena.allocate(specs, path_file=None, timeout_s=60) as block:
                _fill(block["x"], block["y"], block.ref)
        with arena.allocate(specs, path_file=path_file, timeout_s=60) as block:
            _fill(block["x"], block["y"], block.ref)
            ref = block.publish(_digest(block.ref))
        in_pieces += len(block.pieces) > 1
        if draw.random() < _EARLY_SHARE:
            doomed.append(ref)
        os.write(pipes[cycle % len(pipes)], _MESSAGE.pack(*ref.to_words(), path_number))
        while len(doomed) > 4 or (doomed and draw.random() < 0.3):
            free(doomed.popleft())
    for ref in doomed:
        free(ref)
    return in_pieces


def _counts(process: subprocess.Popen[bytes]) -> Counts:
    assert process.stdout is not None
    output = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"a reader exited with status {process.returncode}")
    return Counts(**json.loads(output))


def read(folder: Path, seed: int) -> Counts:
    """Run a reader: read the blocks of all references from standard input, and return the counts."""
    draw = random.Random(seed)
    counts = {field.name: 0 for field in fields(Counts)}
    while message := sys.stdin.buffer.read(_MESSAGE.size):
        name_word, shape_word, path_number = _MESSAGE.unpack(message)
        ref = Ref.from_words(name_word, shape_word)
        counts[_read_one(ref, slow=draw.random() < _SLOW_SHARE, counts=counts)] += 1
        if path_number < 0:
            free(ref)
        else:
            path_file = folder / f"{path_number}.txt"
            release(path_file)
            path_file.unlink()
    return Counts(**counts)


def _read_one(ref: Ref, *, slow: bool, counts: dict[str, int]) -> str:
    try:
        view = attach(ref)
    except StaleReference:
        return "stale"
    x = np.empty_like(view["x"])
    half = len(x) // 2
    x[:half] = view["x"][:half]
    if slow:
        time.sleep(_SLOW_S)
    x[half:] = view["x"][half:]
    y, digest = view["y"].copy(), view.digest
    try:
        view.verify()
    except StaleReference:
        counts["mixed"] += not _is_whole(x, y, digest, ref)
        return "stale_after_copy"
    return "fresh" if _is_whole(x, y, digest, ref) else "torn"


def _fill(x: np.ndarray, y: np.ndarray, ref: Ref) -> None:
    content = _content(ref, len(x))
    half = len(x) // 2
    x[:half] = content[:half]
    x[half:] = content[half:]
    y[...] = _salt(ref)


def _is_whole(x: np.ndarray, y: np.ndarray, digest: bytes | None, ref: Ref) -> bool:
    right = ref.shape == x.shape and np.array_equal(x, _content(ref, len(x)))
    return right and bool((y == _salt(ref)).all()) and digest == _digest(ref)


def _content(ref: Ref, size: int) -> np.ndarray:
    return (_PLACES[: -(-size // 8)] + np.uint64(_salt(ref))).view(np.uint8)[:size]


def _salt(ref: Ref) -> int:
    """Return a different 64-bit number for each name word, because multiplication by an odd number is a bijection."""
    return ref.name_word * 0x9E3779B97F4A7C15 % (1 << 64)


def _digest(ref: Ref) -> bytes:
    return struct.pack("<QQ", _salt(ref), ref.block)


def main() -> int:
    """Run a reader or the whole test. Return exit status 0 if no copy was corrupt and every block was counted."""
    parser = argparse.ArgumentParser(prog="python -m tools.shm_stress", description=__doc__)
    parser.add_argument("--cycles", type=int, default=1_000_000)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        print(json.dumps(asdict(read(options.read, options.seed))))
        return 0
    started = time.monotonic()
    counts = stress(options.cycles, options.readers, seed=options.seed)
    print(f"{options.cycles} cycles, {options.readers} readers, {time.monotonic() - started:.0f} s: {counts}")
    return 1 if counts.torn or counts.fresh + counts.stale + counts.stale_after_copy != options.cycles else 0


if __name__ == "__main__":
    sys.exit(main())
