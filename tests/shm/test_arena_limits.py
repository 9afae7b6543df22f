"""Tests for request quotas and the owner's counters."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded
from mindie_mm.shm import Arena, ArraySpec, Ref, free, release, survey
from mindie_mm.shm.format.layout import ArenaStats

MiB = 1 << 20
TENTH = {"x": ArraySpec((100 * 1024,), "uint8")}


def publish(arena: Arena, specs: dict[str, ArraySpec], path_file: Path | None = None, **options: float) -> Ref:
    with arena.allocate(specs, path_file=path_file, **options) as block:
        return block.publish()


def stats(arena: Arena) -> ArenaStats:
    with arena.path.open("rb") as file:
        return ArenaStats.read(file.fileno())


def test_a_request_may_hold_at_most_half_of_an_arena(arena: Arena, tmp_path: Path) -> None:
    greedy, modest = tmp_path / "greedy.txt", tmp_path / "modest.txt"
    refs = [publish(arena, TENTH, greedy) for _ in range(4)]
    with pytest.raises(
        LimitExceeded,
        match=rf"needs [0-9]+ bytes and already holds [0-9]+ bytes; a request may hold at most {MiB // 2} bytes",
    ):
        arena.allocate(TENTH, path_file=greedy)
    assert len(greedy.read_text().splitlines()) == 4, "a refused block must not be recorded"
    publish(arena, TENTH, modest)
    publish(arena, TENTH)
    free(refs[0])
    publish(arena, TENTH, greedy)
    release(greedy)
    assert arena.num_blocks == 2
    for _ in range(3):
        publish(arena, TENTH, modest)


def test_unpublished_blocks_count_towards_the_quota_until_they_are_discarded(tmp_path: Path) -> None:
    path_file = tmp_path / "shm_name.txt"
    with Arena.create(MiB, quota_bytes=256 * 1024) as arena:
        with (
            arena.allocate(TENTH, path_file=path_file),
            arena.allocate(TENTH, path_file=path_file),
            pytest.raises(LimitExceeded, match="a request may hold at most 262144"),
        ):
            arena.allocate(TENTH, path_file=path_file)
        for _ in range(20):
            with arena.allocate(TENTH, path_file=path_file):
                pass


def test_a_quota_of_zero_bytes_is_refused() -> None:
    with pytest.raises(InputError, match="quota of a request is 0 bytes"):
        Arena.create(MiB, quota_bytes=0)


def test_the_owner_keeps_its_counters_in_the_arena_file(arena: Arena) -> None:
    refs = [publish(arena, TENTH) for _ in range(9)]
    taken = arena.used_bytes
    assert 9 * 100 * 1024 < taken < MiB
    with pytest.raises(ArenaFull):
        arena.allocate({"x": ArraySpec((200 * 1024,), "uint8")}, path_file=None, timeout_s=0.02)
    for ref in refs:
        free(ref)
    assert arena.used_bytes == 0
    assert arena.populated.wait(120)
    counted = stats(arena)
    assert counted == ArenaStats(
        populated_bytes=arena.path.stat().st_size,
        used_bytes=0,
        peak_bytes=taken,
        allocations=9,
        waits=1,
        full=1,
        taken_back=9,
        waiting_bytes=0,
        waited_ns=counted.waited_ns,
    )
    assert counted.waited_ns >= 0.02e9


def test_freed_blocks_are_swept_long_before_the_arena_is_full() -> None:
    """Each allocation also sweeps some of the blocks, so that freed blocks are reclaimed early."""
    with Arena.create(64 * MiB) as arena:
        kept = [publish(arena, {"x": ArraySpec((10,), "uint8")}) for _ in range(500)]
        for _ in range(2000):
            free(publish(arena, {"x": ArraySpec((10,), "uint8")}))
        assert stats(arena).peak_bytes <= (len(kept) + 2 * len(kept) // 16) * 4096
        assert arena.num_blocks == len(kept)


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan])
def test_an_invalid_timeout_is_refused(arena: Arena, timeout_s: float) -> None:
    with pytest.raises(InputError, match="must be at least 0"):
        arena.allocate(TENTH, path_file=None, timeout_s=timeout_s)


def test_requests_may_wait_in_line_without_a_deadline(arena: Arena) -> None:
    with arena.allocate({"x": ArraySpec((1000 * 1024,), "uint8")}, path_file=None) as block:
        block.publish()
    served: list[Ref] = []
    waiting = [
        threading.Thread(target=lambda: served.append(publish(arena, TENTH, timeout_s=math.inf))) for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    while len(arena._queue.line) < 2 and all(thread.is_alive() for thread in waiting):
        threading.Event().wait(0.001)
    arena.free(block)
    for thread in waiting:
        thread.join()
    assert len(served) == 2


def test_an_impossible_request_is_refused_while_others_wait(arena: Arena, tmp_path: Path) -> None:
    publish(arena, {"x": ArraySpec((1000 * 1024,), "uint8")})
    waiting = threading.Thread(target=lambda: publish(arena, TENTH))
    waiting.start()
    while not arena._queue.line:
        threading.Event().wait(0.001)
    with pytest.raises(LimitExceeded, match="the arena has only 1048576"):
        arena.allocate({"x": ArraySpec((2 * MiB,), "uint8")}, path_file=None)
    with pytest.raises(LimitExceeded, match="a request may hold at most 524288"):
        arena.allocate({"x": ArraySpec((900 * 1024,), "uint8")}, path_file=tmp_path / "shm_name.txt")
    assert arena._queue.line
    with pytest.raises(ArenaFull):
        arena.allocate(TENTH, path_file=None, timeout_s=0)
    (block,) = next(info for info in survey() if info.number == arena.number).blocks
    free(Ref(arena.number, block.block, block.generation))
    waiting.join()


def test_pieces_that_cannot_be_mapped_leak_no_space(start) -> None:
    """A separate process uses up its file descriptors, so that no piece can be mapped."""
    process = start("""
import resource
with Arena.create(1 << 20) as arena:
    def publish(size):
        with arena.allocate({"x": ArraySpec((size,), "uint8")}, path_file=None, timeout_s=0) as block:
            return block.publish()
    refs = [publish(15 << 10) for _ in range(64)]
    for ref in refs[::2]:
        free(ref)
    used = arena.used_bytes
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 1024))
    try:
        publish(100 << 10)
    except SharedMemoryError as error:
        say("Too many open files" in str(error), arena.used_bytes == used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    attach(publish(100 << 10)).verify()
say("fine")
""")
    assert process.hear() == "True True"
    assert process.hear() == "fine"
