"""Tests that shared memory has the layout of docs/wire-format.md, and that arbitrary bytes are handled."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindie_mm.errors import SegmentMissing
from mindie_mm.shm import Arena, ArraySpec, Ref
from mindie_mm.shm.format.block import BlockHeader, BlockPlan, DamagedHeaderError
from mindie_mm.shm.format.layout import PAGE, ArenaHeader, Extent, Owner
from mindie_mm.shm.format.spec import DTYPES
from mindie_mm.shm.owner.heap import Heap, size_class
from mindie_mm.shm.path_file import read_contents

OWNER = Owner(1234, 5678, "6f1dcb2b-7c2e-4f31-9f0a-0d6b6f0a3c11", 4026531836, 4026531841)
HEADER = ArenaHeader(0x1F2A, 64, 1 << 20, 1_700_000_000_000_000_000, OWNER)


def test_an_arena_header_packs_to_the_documented_bytes() -> None:
    expected = struct.pack(
        "<8s4I6Q", b"mindieMM", 1, 0x1F2A, 64, 64, 8192, 12288, 1 << 20, 1_700_000_000_000_000_000, 1234, 5678
    )
    expected += bytes.fromhex(OWNER.boot_id.replace("-", "")) + struct.pack("<3Q", 4026531836, 4026531841, 0)
    assert HEADER.pack() == expected + struct.pack("<I", zlib.crc32(expected))
    assert ArenaHeader.unpack(HEADER.pack(), 12288 + (1 << 20)) == HEADER


def test_a_block_header_packs_to_the_documented_bytes() -> None:
    plan = BlockPlan.of({"x": ArraySpec((37, 588), "uint8"), "yy": ArraySpec((3,), "int64")}, b"/r/shm_name.txt")
    header = BlockHeader(17, 1234567, plan.arrays, "/r/shm_name.txt", b"d" * 16)
    data = plan.header(17, 1234567, b"/r/shm_name.txt", b"d" * 16)
    body = struct.pack("<IIHHHH64s", 17, 1234567, 2, 15, 16, 0, b"d" * 16)
    body += struct.pack("<QBBBB2Q", 192, 1, 0, 2, 0, 37, 588) + b"x"
    body += struct.pack("<QBBBBQ", 192 + 21760, 2, 7, 1, 0, 3) + b"yy"
    body += b"/r/shm_name.txt"
    size = 12 + len(body)
    assert data == b"MMB1" + struct.pack("<II", zlib.crc32(body, size), size) + body
    assert BlockHeader.unpack(data + bytes(plan.size), 0, plan.size) == header
    assert plan.size == 192 + 21760 + 64


specs = st.dictionaries(
    st.text(min_size=1, max_size=20),
    st.builds(ArraySpec, st.lists(st.integers(1, 16), min_size=1, max_size=6).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=8,
)


@given(
    specs,
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=50),
    st.binary(min_size=16, max_size=64),
)
def test_block_headers_round_trip(specs: dict[str, ArraySpec], request: str, digest: bytes) -> None:
    plan = BlockPlan.of(specs, request.encode())
    header = BlockHeader(5, 6, plan.arrays, request, digest)
    data = plan.header(5, 6, request.encode(), digest)
    end = min(array.offset for array in plan.arrays.values())
    assert len(data) <= end
    for array in plan.arrays.values():
        assert array.offset % 64 == 0
        assert array.offset >= end
        end = array.offset + array.spec.nbytes
    assert end <= plan.size
    assert BlockHeader.unpack(data, 0, plan.size) == header


@settings(max_examples=400)
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_decode_to_a_block_header_or_are_refused(body: bytes, checked: bool) -> None:
    size = 12 + len(body)
    crc = zlib.crc32(body, size) if checked else 0
    data = b"MMB1" + struct.pack("<II", crc, size) + body
    try:
        header = BlockHeader.unpack(data, 0, 4096)
    except DamagedHeaderError:
        return
    assert all(array.offset + array.spec.nbytes <= 4096 for array in header.arrays.values())


@settings(max_examples=150)
@given(st.binary(min_size=112, max_size=112), st.integers(0, 1 << 40))
def test_arbitrary_bytes_decode_to_an_arena_header_or_are_refused(body: bytes, file_bytes: int) -> None:
    body = b"mindieMM" + struct.pack("<I", 1) + body[12:]
    try:
        header = ArenaHeader.unpack(body + struct.pack("<I", zlib.crc32(body)), file_bytes)
    except SegmentMissing:
        return
    assert header.file_bytes == file_bytes


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"mindie_mm-1f2a 17 5\n", b"mindie_mm-", b"\n"]), max_size=8))
def test_each_line_of_arbitrary_bytes_is_a_reference_or_damaged(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path_file = tmp_path_factory.getbasetemp() / "fuzzed.txt"
    path_file.write_bytes(b"".join(parts))
    contents = read_contents(path_file)
    assert len(contents.refs) + len(contents.damaged) == len(io.BytesIO(b"".join(parts)).readlines())
    assert all(Ref.from_words(ref.name_word, None) == ref for ref in contents.refs)


@settings(max_examples=150)
@given(st.lists(st.integers(1, 20 * PAGE), max_size=60), st.randoms(use_true_random=False))
def test_a_heap_allocates_no_byte_twice_and_merges_freed_extents(sizes: list[int], random) -> None:
    heap = Heap(PAGE, PAGE * 101)
    held: list[Extent] = []
    for size in sizes:
        extent = heap.allocate(size)
        if extent is None:
            assert size > heap.largest_bytes
        else:
            offset, found = extent
            assert offset % PAGE == found % PAGE == 0
            assert size <= found <= size_class(size) < size + max(PAGE, size / 8 + 1)
            assert all(offset + found <= other or other + length <= offset for other, length in held)
            held.append(extent)
        if held and random.random() < 0.5:
            heap.free(held.pop(random.randrange(len(held))))
        assert heap.free_bytes == PAGE * 100 - sum(nbytes for _, nbytes in held)
    for extent in held:
        heap.free(extent)
    assert heap.largest_bytes == heap.free_bytes == PAGE * 100


def test_an_arena_file_follows_the_documented_layout(arena: Arena) -> None:
    with arena.allocate({"x": ArraySpec((5,), "uint8")}, path_file=None) as block:
        block["x"][...] = 9
        ref = block.publish()
    data = Path(arena.path).read_bytes()
    header = ArenaHeader.unpack(data, len(data))
    state, offset, size, *_ = struct.unpack_from("<8Q", data, 4096 + 64 * ref.block)
    assert state == ref.generation << 8 | 2
    assert (offset, size) == (header.data_offset, 4096)
    found = BlockHeader.unpack(data, offset, offset + size)
    assert data[offset + found.arrays["x"].offset :][:5] == b"\x09" * 5
