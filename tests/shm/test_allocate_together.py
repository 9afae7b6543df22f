"""Tests for `Arena.allocate_together`, which allocates blocks for all items of a request, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mindie_mm.errors import InputError, LimitExceeded, SharedMemoryError
from mindie_mm.shm import Arena, ArraySpec, attach, release
from mindie_mm.shm.path_file import read_contents
from tests.shm.at_once import at_once

PAGE = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(64 * PAGE, quota_bytes=48 * PAGE) as arena:
        yield arena


@pytest.fixture
def path_file(tmp_path: Path) -> Path:
    return tmp_path / "shm_name.txt"


def pages(*counts: int) -> list[dict[str, ArraySpec]]:
    return [{"bytes": ArraySpec((count * PAGE - 1024,), "uint8")} for count in counts]


def test_all_blocks_are_recorded_before_they_are_handed_out(arena: Arena, path_file: Path) -> None:
    blocks = at_once(arena, pages(3, 4), path_file=path_file)
    assert blocks is not None
    recorded = [(ref.arena, ref.block, ref.generation) for ref in read_contents(path_file).refs]
    assert recorded == [(arena.number, block.entry, block.generation) for block in blocks]
    for number, block in enumerate(blocks):
        block["bytes"][...] = number
        block.publish()
    for number, block in enumerate(blocks):
        with attach(block.ref) as view:
            assert np.all(view["bytes"] == number)
    assert release(path_file) == 2
    assert arena.num_blocks == 0


@pytest.mark.parametrize("items", [(48,), (16, 16), (8, 8, 8, 8), (1,) * 40])
def test_a_request_without_room_for_all_items_gets_no_block(
    arena: Arena, path_file: Path, tmp_path: Path, items: tuple[int, ...]
) -> None:
    held = at_once(arena, pages(40), path_file=tmp_path / "other.txt")
    assert held is not None
    used = arena.used_bytes
    assert at_once(arena, pages(*items), path_file=path_file) is None
    assert not path_file.exists()
    assert arena.num_blocks == 1
    assert arena.used_bytes == used
    arena.free(held[0])
    blocks = at_once(arena, pages(*items), path_file=path_file)
    assert blocks is not None
    for block in blocks:
        arena.free(block)
    assert arena.used_bytes == 0


def test_holes_between_blocks_count_as_room(arena: Arena, tmp_path: Path) -> None:
    held = [at_once(arena, pages(4), path_file=tmp_path / f"{index}.txt") for index in range(16)]
    for blocks in held[::2]:
        arena.free(blocks[0])
    found = at_once(arena, pages(10, 20), path_file=tmp_path / "pieces.txt")
    assert [len(block.pieces) > 1 for block in found] == [True, True]
    for block in found:
        block["bytes"][...] = 7
        block.publish()
    assert release(tmp_path / "pieces.txt") == 2
    for blocks in held[1::2]:
        arena.free(blocks[0])
    assert arena.num_blocks == 0


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((65,), "take 266240 bytes of shared memory; the arena has only 262144 bytes .--arena-bytes."),
        ((32, 33), "the arena has only 262144"),
        ((49,), "a request may hold at most 196608 bytes of an arena"),
        ((24, 25), "a request may hold at most 196608 bytes of an arena"),
    ],
)
def test_a_request_beyond_the_arena_or_its_quota_is_refused(
    arena: Arena, path_file: Path, items: tuple[int, ...], message: str
) -> None:
    with pytest.raises(LimitExceeded, match=message):
        at_once(arena, pages(*items), path_file=path_file)
    assert arena.num_blocks == 0
    assert not path_file.exists()


def test_the_quota_of_a_request_includes_the_blocks_it_holds(arena: Arena, path_file: Path) -> None:
    (block,) = at_once(arena, pages(40), path_file=path_file)
    with pytest.raises(LimitExceeded, match="needs 36864 bytes and already holds 163840"):
        at_once(arena, pages(9), path_file=path_file)
    assert at_once(arena, pages(8), path_file=path_file) is not None
    arena.free(block)
    assert at_once(arena, pages(48), path_file=path_file) is not None


def test_more_items_than_the_arena_has_entries_are_refused(tmp_path: Path) -> None:
    with Arena.create(64 * PAGE, quota_bytes=64 * PAGE) as arena:
        entries = arena._file.header.num_entries
        tiny = [{"x": ArraySpec((1,), "uint8")}] * (entries + 1)
        with pytest.raises(LimitExceeded):
            at_once(arena, tiny, path_file=tmp_path / "a.txt")


def test_an_unwritable_path_file_allocates_no_block(arena: Arena, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "a.txt", f"{tmp_path}/\0"):
        with pytest.raises((InputError, SharedMemoryError)):
            at_once(arena, pages(3, 4), path_file=path)
        assert arena.num_blocks == 0


def test_a_closed_arena_refuses_allocation(path_file: Path) -> None:
    with Arena.create(64 * PAGE) as arena:
        pass
    with pytest.raises(SharedMemoryError, match="closed"):
        at_once(arena, pages(3), path_file=path_file)
