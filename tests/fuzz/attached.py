"""Fuzzing targets that read damaged arenas in real shared memory: `attach`, `View.verify` and `survey`."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mindie_mm.errors import BadReference
from mindie_mm.shm import Arena, ArraySpec, Ref, attach, free, survey
from mindie_mm.shm.format.layout import ENTRY_BYTES, PAGE, ArenaHeader
from mindie_mm.shm.mapped import close_removed
from tests.fuzz.target import Target, sealed, sealed_arena

_SPECS = (
    {"x": ArraySpec((5,), "uint8")},
    {"pixel_values": ArraySpec((37, 588), "uint8"), "item": ArraySpec((6,), "int64")},
    {"a": ArraySpec((2, 3, 4, 5), "float16"), "b": ArraySpec((1,) * 6, "bool"), "c": ArraySpec((700,), "float64")},
    {"x": ArraySpec((40_000,), "uint8"), "y": ArraySpec((3000,), "int64")},
)
_PATCH = struct.Struct("<BBH")  # place, size of the patch, and offset within the place
_HEADER, _ENTRY, _RELEASE, _ANY = range(4)
_PLACE_BYTES = (192, ENTRY_BYTES, 8)
_SURVEY_EVERY = 64


def _patches(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the place, the offset and the bytes of each patch in an input."""
    at = 0
    while at + _PATCH.size < len(data):
        place, size, where = _PATCH.unpack_from(data, at)
        at += _PATCH.size
        yield place % 4, where, data[at : at + 1 + size % 64]
        at += 1 + size % 64


def _patch(place: int, where: int, change: bytes) -> bytes:
    return _PATCH.pack(place, len(change) - 1, where) + change


def _seeds() -> tuple[bytes, ...]:
    word = struct.pack("<Q", 4096)
    changes = [(_HEADER, at, word) for at in (0, 4, 8, 16, 20, 24, 92, 100, 104)]
    changes += [(_ENTRY, at, word) for at in range(0, ENTRY_BYTES, 8)] + [(_RELEASE, 0, word), (_ANY, 30000, word)]
    return tuple(bytes([flags]) + _patch(*change) for flags in (0, 1, 6, 7) for change in changes)


def _read(ref: Ref) -> bool:
    """Attach a block, read every byte and verify it. Return False if an error occurs that fails only one request."""
    try:
        with attach(ref) as view:
            for array in view.values():
                array.tobytes()
                assert not array.flags.writeable
    except BadReference:
        return False
    return True


@contextmanager
def living_arena() -> Iterator[Target]:
    """Yield a target that damages a block of a living arena as soon as the block is published.

    An input consists of flags (bit 0 repairs the header, bits 1 and 2 select specs) and patches. Other blocks occupy
    half of the arena, with gaps between them, so blocks with the largest specs have several pieces.
    """
    with Arena.create(1 << 18) as arena, arena.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        header = ArenaHeader.unpack(memory[:PAGE], len(memory))
        _leave_gaps(arena)
        inputs = 0

        def check(data: bytes) -> bool:
            nonlocal inputs
            inputs += 1
            flags = data[0] if data else 0
            with arena.allocate(_SPECS[flags >> 1 & 3], path_file=None) as block:
                ref = block.publish()
            entry, release = PAGE + ENTRY_BYTES * ref.block, header.releases_offset + 8 * (1 + ref.block)
            (offset,) = struct.unpack_from("<Q", memory, entry + 8)
            control, rest = memory[PAGE : header.data_offset], memory[header.data_offset :]
            try:
                _damage(memory, data[1:], (offset, entry, release))
                if flags & 1:
                    size = min(max(int.from_bytes(memory[offset + 8 : offset + 12], "little"), 12), PAGE)
                    memory[offset : offset + size] = sealed(memory[offset : offset + size])
                accepted = _read(ref)
                if inputs % _SURVEY_EVERY == 0:
                    survey()
            finally:
                memory[PAGE:] = control + rest
            assert _read(ref), "the block must be readable after the repair"
            free(ref)
            return accepted

        yield Target(_seeds(), check)


def _leave_gaps(arena: Arena) -> None:
    """Fill the arena with blocks of four pages, and free every other block."""
    specs = {"x": ArraySpec((15_000,), "uint8")}
    blocks = [arena.allocate(specs, path_file=None) for _ in range(arena.capacity_bytes // (4 * PAGE))]
    for block in blocks[::2]:
        block.__exit__(None, None, None)
    for block in blocks[1::2]:
        block.publish()


def _damage(memory: mmap.mmap, patches: bytes, places: tuple[int, int, int]) -> None:
    for place, where, change in _patches(patches):
        anywhere = PAGE + where % (len(memory) - PAGE)  # in the block table or in any block
        start = anywhere if place == _ANY else places[place] + where % _PLACE_BYTES[place]
        stop = min(start + len(change), len(memory))
        memory[start:stop] = change[: stop - start]


@contextmanager
def arena_file() -> Iterator[Target]:
    """Yield a target that replaces an arena's file with a damaged file.

    An input consists of flags (which headers to repair, whether to change the size), a change of the size, and patches.
    """
    with Arena.create(1 << 16) as arena:
        with arena.allocate(_SPECS[2], path_file=None) as block:
            ref = block.publish()
        template, path = arena.path.read_bytes(), arena.path
    header = ArenaHeader.unpack(template, len(template))
    places = (header.data_offset, PAGE + ENTRY_BYTES * ref.block, header.releases_offset + 8 * (1 + ref.block))
    scratch = path.with_name(f"fuzzed-{path.name}-{os.getpid()}")
    kept: list[int] = []
    inputs = 0

    def check(data: bytes) -> bool:
        nonlocal inputs
        inputs += 1
        content = bytearray(template)
        flags, resize = data[0] if data else 0, int.from_bytes(data[1:5].ljust(4, b"\0"), "little", signed=True)
        for place, where, change in _patches(data[5:]):
            start = where % 116 if place == _ANY else places[place] + where % _PLACE_BYTES[place]
            content[start : start + len(change)] = change
        if flags & 1:
            content[: len(template)] = sealed_arena(bytes(content))
        if flags & 2:
            size = min(max(int.from_bytes(content[places[0] + 8 : places[0] + 12], "little"), 12), 4096)
            content[places[0] : places[0] + size] = sealed(bytes(content[places[0] : places[0] + size]))
        if flags & 4:
            del content[max(0, len(content) + resize % (1 << 18) - (1 << 17)) :]
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        kept.append(descriptor)
        # The lock marks the file as having a living owner, so no collector removes it.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, content)
        scratch.rename(path)
        if len(kept) > 1:
            os.close(kept.pop(0))
        accepted = _read(ref)
        if inputs % _SURVEY_EVERY == 0:
            survey()
        return accepted

    seeds = tuple(bytes([flags, 0, 0, 0, 0]) + seed[1:] for seed in _seeds() for flags in (0, 3, 7))
    try:
        yield Target(seeds, check)
    finally:
        for left in (scratch, path):
            with suppress(FileNotFoundError):
                left.unlink()
        for descriptor in kept:
            os.close(descriptor)
        close_removed()
