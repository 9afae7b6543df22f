"""What lies in /dev/shm, and what of it belongs to the dead: the operator's view and the collector."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.errors import MindieMMError, SegmentMissing
from mindie_mm.shm.block_header import MAX_HEADER_BYTES, BlockHeader, DamagedHeaderError
from mindie_mm.shm.layout import (
    ALLOCATED_NS,
    FREE,
    MAGIC,
    OFFSET,
    PAGE,
    PUBLISHED,
    SHM_DIRECTORY,
    SIZE,
    STATE,
    STATE_NAMES,
    WORDS_PER_ENTRY,
    ArenaHeader,
    Owner,
)
from mindie_mm.shm.life import is_locked, unlink_same
from mindie_mm.shm.reader import drop_removed, release_block
from mindie_mm.shm.ref import Ref
from mindie_mm.shm.spec import ArraySpec
from mindie_mm.shm.spool import collect_request, request_directories

_log = logging.getLogger(__name__)
_FILE_NAME = re.compile(r"mindie_mm-([0-9a-f]{4})")


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block that nobody freed."""

    block: int
    generation: int
    state: str
    """filling or published."""
    num_bytes: int
    """In whole pages."""
    arrays: Mapping[str, ArraySpec]
    """Empty if the header cannot be read, as while it is written."""
    request: str
    """Path of the request's path file; empty if it has none, or the header cannot be read."""
    age_s: float


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """An arena of this user."""

    number: int
    file: str
    """Its path."""
    owner: Owner | None
    """None if the header is damaged."""
    alive: bool
    """Whether its owner holds its lock."""
    age_s: float
    capacity_bytes: int
    """Bytes for blocks."""
    used_bytes: int
    """Bytes in blocks that nobody freed."""
    blocks: tuple[BlockInfo, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """What `collect` reclaimed."""

    arenas: tuple[str, ...]
    """Paths of the arenas that it removed: their owners are dead."""
    arena_bytes: int
    """Bytes of their files."""
    blocks: tuple[Ref, ...]
    """Blocks that it freed in the arenas of the living: their requests are gone."""
    requests: tuple[Path, ...]
    """Request directories that it released and removed: no process holds them."""


def survey() -> list[ArenaInfo]:
    """Every arena of this user in /dev/shm, by number. Reads only; needs no service, and never waits."""
    arenas = []
    for number, path in _arena_files():
        with _opened(path, os.O_RDONLY) as descriptor:
            if descriptor is not None:
                arenas.append(_describe(number, path, descriptor))
    return arenas


def collect(request_roots: Iterable[Path] = ()) -> Collected:
    """Reclaims what belongs to the dead, and nothing else:

    arenas whose owner holds no lock; published blocks of living arenas whose path file is gone, where it would be
    seen from here; below each of `request_roots`, request directories that no process holds. What cannot be reclaimed
    is logged, and left for the next time.
    """
    requests = tuple(directory for root in request_roots for directory in _collect_requests(root))
    arenas = dict(_collect_arenas())
    blocks = tuple(_collect_blocks())
    drop_removed()
    return Collected(tuple(arenas), sum(arenas.values()), blocks, requests)


def _arena_files() -> list[tuple[int, Path]]:
    matches = [(_FILE_NAME.fullmatch(path.name), path) for path in sorted(SHM_DIRECTORY.iterdir())]
    return [(int(match[1], 16), path) for match, path in matches if match]


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int | None]:
    """The file, if it is an arena of this user and still there; else None."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # gone, a link, or not ours to open
        yield None
        return
    try:
        ours = os.fstat(descriptor).st_uid == os.geteuid() and _first_bytes(descriptor) == MAGIC
        yield descriptor if ours else None
    finally:
        os.close(descriptor)


def _first_bytes(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, len(MAGIC), 0)
    except OSError:  # a directory, a pipe
        return b""


def _describe(number: int, path: Path, descriptor: int) -> ArenaInfo:
    alive = is_locked(descriptor)
    try:
        header = ArenaHeader.read(descriptor, os.fstat(descriptor))
    except SegmentMissing:
        return ArenaInfo(number, str(path), None, alive, 0.0, 0, 0, ())
    blocks = tuple(_blocks(descriptor, header))
    return ArenaInfo(
        number=number,
        file=str(path),
        owner=header.owner,
        alive=alive,
        age_s=max(0.0, (time.time_ns() - header.created_ns) / 1e9),
        capacity_bytes=header.capacity_bytes,
        used_bytes=sum(block.num_bytes for block in blocks),
        blocks=blocks,
    )


def _blocks(descriptor: int, header: ArenaHeader) -> Iterator[BlockInfo]:
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    # The table and the release words at one moment, as nearly as a reader can.
    control = memoryview(os.pread(descriptor, header.data_offset - PAGE, PAGE)).cast("Q")
    releases = control[(header.releases_offset - PAGE) // 8 :]
    state_words = control[STATE : WORDS_PER_ENTRY * header.num_entries : WORDS_PER_ENTRY].tolist()
    for block, word in enumerate(state_words):
        generation, state = word >> 8, word & 0xFF
        if not FREE < state <= PUBLISHED or releases[1 + block] == generation:
            continue
        entry = control[WORDS_PER_ENTRY * block : WORDS_PER_ENTRY * (block + 1)]
        size = min(entry[SIZE], header.capacity_bytes)
        arrays: Mapping[str, ArraySpec] = {}
        request = ""
        try:
            data = os.pread(descriptor, min(size, MAX_HEADER_BYTES), min(entry[OFFSET], header.file_bytes))
            described = BlockHeader.unpack(data, 0, size)
            described.require(block, generation)
        except DamagedHeaderError:
            pass
        else:
            arrays = {name: array.spec for name, array in described.arrays.items()}
            request = described.request
        age_s = max(0.0, (now_ns - entry[ALLOCATED_NS]) / 1e9)
        yield BlockInfo(block, generation, STATE_NAMES[state], size, arrays, request, age_s)


def _collect_arenas() -> Iterator[tuple[str, int]]:
    """Removes the arenas of dead owners; the path and the bytes of each."""
    for _, path in _arena_files():
        with _going_on(path), _opened(path, os.O_RDWR) as descriptor:
            if descriptor is not None and (size := _unlink_if_dead(path, descriptor)):
                yield str(path), size


def _collect_blocks() -> Iterator[Ref]:
    for ref in _orphans(survey()):
        with _going_on(ref):
            if release_block(ref):
                yield ref


def _unlink_if_dead(path: Path, descriptor: int) -> int:
    """Bytes of the arena that was removed; 0 if its owner lives."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    return os.fstat(descriptor).st_size if unlink_same(path, descriptor) else 0


def _orphans(arenas: Iterable[ArenaInfo]) -> Iterator[Ref]:
    """Published blocks whose path file is gone. A block being filled may not have its line yet."""
    mount_namespace = Owner.current().mount_namespace
    for arena in arenas:
        # In another container the same path is another file.
        if arena.owner is None or arena.owner.mount_namespace != mount_namespace:
            continue
        for block in arena.blocks:
            if block.state == STATE_NAMES[PUBLISHED] and block.request and not os.path.lexists(block.request):
                yield Ref(arena.number, block.block, block.generation)


def _collect_requests(root: Path) -> Iterator[Path]:
    with _going_on(root):
        for directory in request_directories(root):
            with _going_on(directory):
                if collect_request(directory):
                    yield directory


@contextmanager
def _going_on(what: object) -> Iterator[None]:
    """What cannot be collected keeps nothing else from it."""
    try:
        yield
    except (MindieMMError, OSError) as error:
        _log.warning("collecting %s: %s", what, error)
