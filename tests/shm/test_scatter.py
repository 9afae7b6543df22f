"""Tests for blocks that consist of several pieces. They are written and read like other blocks."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from mindie_mm.errors import ArenaFull, SegmentMissing, StaleReference
from mindie_mm.shm import Arena, ArraySpec, Ref, attach, collect, free, release, survey
from mindie_mm.shm.format.layout import NEXT, OFFSET, PAGE, SIZE

MiB = 1 << 20
KiB = 1 << 10


def publish(arena: Arena, size: int, path_file: Path | None = None, timeout_s: float = 0.0) -> Ref:
    with arena.allocate({"x": ArraySpec((size,), "uint8")}, path_file=path_file, timeout_s=timeout_s) as block:
        return block.publish()


@pytest.fixture
def holes(arena: Arena) -> list[Ref]:
    """Fill a 1 MiB arena, free every other block of 16 KiB, and return the remaining blocks."""
    blocks = [publish(arena, 15 * KiB) for _ in range(64)]
    for ref in blocks[::2]:
        free(ref)
    assert arena.num_blocks == 32
    assert arena._heap.largest_bytes == 16 * KiB
    return blocks[1::2]


def fill(arena: Arena, path_file: Path | None = None) -> tuple[Ref, np.ndarray]:
    pixels = np.random.default_rng(1).integers(0, 256, (300, 588), np.uint8)
    specs = {"pixel_values": ArraySpec(pixels.shape, "uint8"), "grid": ArraySpec((3,), "int64")}
    with arena.allocate(specs, path_file=path_file, timeout_s=0) as block:
        block["pixel_values"][...] = pixels
        block["grid"][...] = (1, 20, 15)
        return block.publish(b"d" * 16), pixels


def test_a_block_in_pieces_is_written_and_read_like_any_other(arena: Arena, holes: list[Ref], start) -> None:
    ref, pixels = fill(arena)
    with attach(ref) as view:
        assert np.array_equal(view["pixel_values"], pixels)
        assert view["grid"].tolist() == [1, 20, 15]
        assert view.digest == b"d" * 16
        assert not view["pixel_values"].flags.writeable
    process = start(
        "view = attach(Ref.from_words(*map(int, sys.argv[1:])));"
        "say(int(view['pixel_values'].sum(dtype=np.int64)), view['grid'].tolist()); view.verify()",
        *ref.to_words(),
    )
    assert process.hear() == f"{pixels.sum(dtype=np.int64)} [1, 20, 15]"


def test_a_block_in_pieces_takes_only_its_bytes_and_returns_them(
    arena: Arena, holes: list[Ref], path_file: Path
) -> None:
    used = arena.used_bytes
    ref, pixels = fill(arena, path_file)
    assert pixels.nbytes < arena.used_bytes - used < pixels.nbytes + 2 * PAGE
    (block,) = (block for info in survey() if info.number == arena.number for block in info.blocks if block.request)
    assert (block.block, block.num_bytes, block.state) == (ref.block, arena.used_bytes - used, "published")
    assert block.arrays["pixel_values"].shape == (300, 588)
    assert len(block.pieces) > 10
    assert sum(size for _, size in block.pieces) == block.num_bytes
    places = {place for offset, size in block.pieces for place in range(offset, offset + size, PAGE)}
    (info,) = (info for info in survey() if info.number == arena.number)
    others = [piece for other in info.blocks if other.block != ref.block for piece in other.pieces]
    assert not places & {place for offset, size in others for place in range(offset, offset + size, PAGE)}
    assert arena.num_blocks == 33
    assert release(path_file) == 1
    with pytest.raises(StaleReference):
        attach(ref)
    for hole in holes:
        free(hole)
    assert arena.used_bytes == 0
    assert arena._heap.largest_bytes == arena.capacity_bytes
    whole = publish(arena, MiB - PAGE)
    attach(whole).verify()


def test_an_array_of_a_freed_block_is_readable_but_fails_verification(arena: Arena, holes: list[Ref]) -> None:
    ref, _ = fill(arena)
    view = attach(ref)
    pixels = view["pixel_values"]
    free(ref)
    for _ in range(8):
        fill_value = publish(arena, 15 * KiB)
        assert fill_value != ref
    assert pixels.sum() >= 0
    with pytest.raises(StaleReference):
        view.verify()


def test_a_block_larger_than_all_holes_together_is_refused(arena: Arena, holes: list[Ref]) -> None:
    publish(arena, 500 * KiB)
    with pytest.raises(ArenaFull, match=r"[0-9]+ of 1048576 bytes are free"):
        publish(arena, 40 * KiB)


def test_a_discarded_block_returns_its_pieces(arena: Arena, holes: list[Ref]) -> None:
    for _ in range(5):
        with (
            pytest.raises(ZeroDivisionError),
            arena.allocate({"x": ArraySpec((400 * KiB,), "uint8")}, path_file=None, timeout_s=0) as block,
        ):
            block["x"][...] = 1 // 0
    assert arena.num_blocks == 32


@pytest.mark.parametrize(
    ("word", "value"),
    [(OFFSET, 7), (OFFSET, 1 << 50), (OFFSET, 0), (SIZE, 1 << 40), (SIZE, 5), (SIZE, 0), (NEXT, 1 << 30), (NEXT, 1)],
)
def test_damaged_links_between_pieces_raise_segment_missing(
    arena: Arena, holes: list[Ref], word: int, value: int
) -> None:
    ref, _ = fill(arena)
    with arena.path.open("r+b") as file:
        file.seek(PAGE + 64 * ref.block + 8 * NEXT)
        (behind,) = struct.unpack("<Q", file.read(8))
        file.seek(PAGE + 64 * (behind - 1) + 8 * word)
        file.write(struct.pack("<Q", ref.block + 1 if word == NEXT and value == 1 else value))
    with pytest.raises(SegmentMissing, match=r"not whole pages|header is damaged"):
        attach(ref)
    for hole in holes:
        attach(hole).verify()


def test_a_reference_to_a_piece_is_stale(arena: Arena, holes: list[Ref]) -> None:
    ref, _ = fill(arena)
    with arena.path.open("rb") as file:
        file.seek(PAGE + 64 * ref.block + 8 * NEXT)
        (behind,) = struct.unpack("<Q", file.read(8))
        file.seek(PAGE + 64 * (behind - 1))
        (state,) = struct.unpack("<Q", file.read(8))
    with pytest.raises(StaleReference, match="is piece"):
        attach(Ref(arena.number, behind - 1, state >> 8))
    free(Ref(arena.number, behind - 1, state >> 8))
    attach(ref).verify()
    assert collect().of("request_gone") == ()


def test_small_blocks_never_wait_while_a_quarter_is_free(path_file: Path) -> None:
    """The blocks have random sizes, up to a sixteenth of the capacity, and random lifetimes."""
    draw = random.Random(5)
    with Arena.create(32 * MiB) as arena:
        living: list[Ref] = []
        scattered = 0
        for _ in range(4000):
            size = min(int(draw.lognormvariate(11.5, 1.6)), 2 * MiB - KiB)
            while living and arena.capacity_bytes - arena.used_bytes < arena.capacity_bytes // 4:
                free(living.pop(draw.randrange(len(living))))
            living.append(publish(arena, size))
            scattered += living[-1].block in arena._table._rest
        assert scattered > 10
        for ref in living:
            attach(ref).verify()
