"""Fuzzing targets that parse bytes without an arena: handle words, headers and path files.

If a checksum is wrong, the code behind the check does not run. A flag in each input can therefore repair the checksums.
"""

from __future__ import annotations

import mmap
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindie_mm.errors import CorruptReference, SegmentMissing
from mindie_mm.shm import ArraySpec, Ref, is_name_word
from mindie_mm.shm.format.block import BlockHeader, BlockPlan, DamagedHeaderError
from mindie_mm.shm.format.layout import ENTRY_BYTES, SHM_DIRECTORY, ArenaHeader, Owner
from mindie_mm.shm.format.mindie_words import (
    decode_shape_from_int64,
    decode_shm_name_from_int64,
    encode_shape_to_int64,
    encode_shm_name_to_int64,
)
from mindie_mm.shm.format.spec import DTYPES
from mindie_mm.shm.path_file import read_contents
from tests.fuzz.target import Target, sealed, sealed_arena

_WORDS = struct.Struct("<BQQ")
_OWNER = Owner(1234, 5678, "6f1dcb2b-7c2e-4f31-9f0a-0d6b6f0a3c11", 4026531836, 4026531841)
_SHAPES = ((37, 588), (1,), (2**40,), (64, 3, 448, 448), (1, 16, 3, 1024, 1024), (16,) * 6, (1, 2**32))


@contextmanager
def words() -> Iterator[Target]:
    """Yield a target for `Ref.from_words`.

    An input consists of flags (repair the name word, repair the shape word, omit the shape word, use integers beyond
    int64) and two words.
    """
    seeds = []
    for number, shape in enumerate(_SHAPES):
        ref = Ref(7919 * number % 65536, 1234 * number % 16384, 1 + 99991 * number, DTYPES[number], shape)
        name, shape_word = (word % (1 << 64) for word in ref.to_words())
        seeds += [_WORDS.pack(flags, name, shape_word) for flags in (0, 3, 4)]
    yield Target(tuple(seeds), _check_words)


def _check_words(data: bytes) -> bool:
    flags, name, shape = _WORDS.unpack(data[: _WORDS.size].ljust(_WORDS.size, b"\0"))
    if flags & 1:
        name = 1 << 63 | (name & (1 << 62) - 256) | _crc8((name & (1 << 62) - 256 | 1 << 63) >> 8, 0xFF)
    if flags & 2:
        body = 3 << 62 | (shape & (1 << 62) - 256)
        shape = body | _crc8(body >> 8, _crc8(name >> 8, 0x5A))
    # An unsigned integer with the same bits, or an integer of more than 64 bits, is not a valid word.
    beyond = (0, 1 << 64, -(1 << 64), 1 << 70)[flags >> 4 & 3]
    name_word = name - (1 << 64) * (name >> 63) + beyond
    shape_word = None if flags & 4 else shape - (1 << 64) * (shape >> 63) + (beyond if flags & 64 else 0)
    try:
        ref = Ref.from_words(name_word, shape_word)
    except CorruptReference:
        return False
    assert is_name_word(name_word)
    assert ref.name_word == name_word
    assert shape_word is None or ref.to_words() == (name_word, shape_word)
    return True


def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(crc << 1) ^ (0x107 if crc & 0x80 else 0) for crc in table]
    return table


_CRC = _crc_table()


def _crc8(payload: int, crc: int) -> int:
    for byte in payload.to_bytes(7, "big"):
        crc = _CRC[crc ^ byte]
    return crc


_BLOCK = struct.Struct("<BBH")


@contextmanager
def block_header() -> Iterator[Target]:
    """Yield a target for `BlockHeader.unpack`.

    An input consists of a flag (repair the checksum), the start in units of 64 bytes, the size of the block, and the
    header.
    """
    seeds = []
    for arrays, request in ((1, b""), (2, b"/spool/r1/shm_name.txt"), (64, b"r" * 200)):
        specs = {f"a{i}": ArraySpec((3,) * (1 + i % 6), DTYPES[i % 12]) for i in range(arrays)}
        plan = BlockPlan.of(specs, request)
        packed = plan.header(17, 1234567, request, b"d" * 32)
        seeds += [_BLOCK.pack(flags, start, plan.size) + packed for flags in (0, 1) for start in (0, 64)]
    with mmap.mmap(-1, (1 << 16) + 256 * 64) as memory:
        yield Target(tuple(seeds), lambda data: _check_block_header(memory, data))


def _check_block_header(memory: mmap.mmap, data: bytes) -> bool:
    flags, start, block_bytes = _BLOCK.unpack(data[:4].ljust(4, b"\0"))
    start, header = 64 * start, data[4 : 4 + block_bytes]
    if flags & 1 and len(header) > 12:
        header = sealed(header)
    stop = start + block_bytes
    memory[start:stop] = header.ljust(block_bytes, b"\0")
    try:
        found = BlockHeader.unpack(memory, start, stop)
    except DamagedHeaderError:
        return False
    assert found.arrays
    for array in found.arrays.values():
        assert array.offset % 64 == 0
        assert 0 <= array.offset <= array.offset + array.spec.nbytes <= block_bytes, (array, block_bytes)
    return True


@contextmanager
def arena_header() -> Iterator[Target]:
    """Yield a target for `ArenaHeader.unpack`.

    An input consists of flags (repair the checksum, compute the file size from the header), the file size, and the page
    that contains the header.
    """
    seeds = []
    for entries, capacity in ((64, 1 << 20), (16384, 1 << 40), (1, 4096)):
        header = ArenaHeader(0x1F2A, entries, capacity, 1_700_000_000_000_000_000, _OWNER)
        seeds += [bytes([flags]) + struct.pack("<Q", header.file_bytes) + header.pack() for flags in (0, 1, 3)]
    yield Target(tuple(seeds), _check_arena_header)


def _check_arena_header(data: bytes) -> bool:
    flags, page = data[0] if data else 0, data[9:]
    file_bytes = int.from_bytes(data[1:9].ljust(8, b"\0"), "little")
    if flags & 1:
        page = sealed_arena(page)
    if flags & 2 and len(page) >= 48:
        file_bytes = sum(struct.unpack_from("<QQ", page, 32))
    try:
        header = ArenaHeader.unpack(page, file_bytes)
    except SegmentMissing:
        return False
    magic, version, arena, entries, entry_bytes, releases, start, capacity = struct.unpack_from("<8s4I3Q", page)
    assert (magic, version, entry_bytes) == (b"mindieMM", 1, ENTRY_BYTES)
    assert (header.arena, header.num_entries, header.capacity_bytes) == (arena, entries, capacity)
    assert 1 <= entries <= 16384
    assert 4096 + ENTRY_BYTES * entries <= releases <= releases + 8 * (1 + entries) <= start
    assert header.file_bytes == start + capacity == file_bytes
    return True


_LINE = re.compile(rb"mindie_mm-([0-9a-f]{4}) (0|[1-9][0-9]*) ([1-9][0-9]*)")
_SEGMENT = re.compile(rb"psm_[0-9a-f]{8}")


@contextmanager
def path_file() -> Iterator[Target]:
    """Yield a target for `read_contents`. An input is a path file."""
    line, segment = b"mindie_mm-1f2a 17 1234567\n", b"psm_8c9d4828\n"
    seeds = (b"", line, line * 3, b"mindie_mm-0000 0 1\nmindie_mm-ffff 16383 16777215\n", segment + line, segment * 2)
    # The files are in memory, because a disk would be slow.
    with tempfile.TemporaryDirectory(dir=SHM_DIRECTORY) as folder:
        path = Path(folder) / "shm_name.txt"
        yield Target((*seeds, line[:-1], b"\r\n" + line, b"../../x 1 1\n"), lambda data: _check_path_file(path, data))


def _check_path_file(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    contents = read_contents(path)
    *lines, rest = data.split(b"\n")
    refs = []
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is not None and len(line) < 50 and int(match[2]) < 16384 and int(match[3]) < 1 << 24:
            refs.append(Ref(int(match[1], 16), int(match[2]), int(match[3])))
    assert contents.refs == refs
    assert contents.segments == [line.decode() for line in lines if _SEGMENT.fullmatch(line)]
    found = len(contents.refs) + len(contents.segments) + len(contents.damaged)
    assert found == len(lines) + (rest != b"")
    return found > len(contents.damaged)


_MINDIE = struct.Struct("<Bq")


@contextmanager
def mindie_words() -> Iterator[Target]:
    """Yield a target for MindIE's name words and shape words.

    An input consists of flags (it is a shape word, repair the checksum, use an integer beyond 64 bits) and a word.
    """
    shapes = ((1,), (37, 588), (64, 3, 448), (13, 4, 576, 588), (1, 16, 3, 1024, 1024))
    seeds = [_MINDIE.pack(flags, encode_shape_to_int64(shape)) for shape in shapes for flags in (1, 3)]
    names = ("abCD123", "psm_8c9d4828", "psm_fABCDEFpsmn")
    seeds += [_MINDIE.pack(flags, encode_shm_name_to_int64(name[:14])) for name in names for flags in (0, 2)]
    yield Target(tuple(seeds), _check_mindie_word)


def _check_mindie_word(data: bytes) -> bool:
    flags, word = _MINDIE.unpack(data[: _MINDIE.size].ljust(_MINDIE.size, b"\0"))
    if flags & 2 and word < -7:
        value = -word & ~7
        word = -(value | (value.bit_count() % 3 if flags & 1 else _sum_of_characters(value) & 7))
    word += (0, 0, 1 << 64, -(1 << 64))[flags >> 2 & 3]
    try:
        if flags & 1:
            sizes = decode_shape_from_int64(word)
            assert encode_shape_to_int64(sizes) == word
            assert 1 <= len(sizes) <= 5
            assert min(sizes) >= 1
        else:
            name = decode_shm_name_from_int64(word)
            assert name.startswith("psm_")
            # A name may have eleven characters only if it is given without the prefix.
            assert encode_shm_name_to_int64(name.removeprefix("psm_")) == word
    except CorruptReference:
        return False
    assert -(1 << 63) <= word < 0
    return True


def _sum_of_characters(value: int) -> int:
    return sum(value >> (53 - 5 * place) & 31 for place in range(min(value >> 58, 11)))
