"""Survey of the arenas in /dev/shm, for operators. A survey only reads, never waits, and works without a service."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.errors import SegmentMissing, SharedMemoryError, os_errors_as
from mindie_mm.shm.format import layout
from mindie_mm.shm.format.block import BlockHeader, DamagedHeaderError
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.format.words import Ref
from mindie_mm.shm.liveness_lock import is_locked

_FILE_NAME = re.compile(r"mindie_mm-([0-9a-f]{4})")


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """Block that has not been freed."""

    block: int
    generation: int
    state: str
    """Either "filling" or "published"."""
    num_bytes: int
    """Size of the block in bytes, a multiple of the page size."""
    pieces: layout.Pieces
    """Extents of the block, with offsets from the start of the data region. Empty if the table is damaged."""
    arrays: Mapping[str, ArraySpec]
    """Arrays by name. Empty if the header cannot be read, for example while it is being written."""
    request: str
    """Path of the request's path file. Empty if the block has no path file, or if the header cannot be read."""
    age_s: float


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """Description of an arena that belongs to this user."""

    number: int
    file: str
    """Path of the arena's file."""
    owner: layout.Owner | None
    """Process that created the arena. None if the header is damaged."""
    alive: bool
    """True if the owner is alive, that is, if a process holds the arena's lock."""
    age_s: float
    file_bytes: int
    """Size of the arena's file in bytes."""
    capacity_bytes: int
    """Bytes available for blocks."""
    used_bytes: int
    """Number of bytes in blocks that have not been freed."""
    blocks: tuple[BlockInfo, ...]
    stats: layout.ArenaStats | None
    """Counters that the owner keeps. None if the header is damaged."""

    @property
    def name(self) -> str:
        """Name of the arena's file, without its folder."""
        return Path(self.file).name

    @property
    def populated_fraction(self) -> float:
        """Fraction of the file's pages that have been faulted in, 0 to 1."""
        return 0.0 if self.stats is None else min(1.0, self.stats.populated_bytes / self.file_bytes)

    def ref(self, block: BlockInfo) -> Ref:
        """Return a reference to one of the arena's blocks."""
        return Ref(self.number, block.block, block.generation)


def survey(*, described: bool = True) -> list[ArenaInfo]:
    """Return all arenas of this user in /dev/shm, sorted by number.

    Args:
        described: Whether to read the headers of the blocks. If False, `arrays` and `request` of each block are empty,
            and the call is many times faster.

    Raises:
        SharedMemoryError: /dev/shm cannot be read.

    """
    arenas = []
    for number, path in arena_files():
        with opened(path, os.O_RDONLY) as descriptor:
            if descriptor is not None:
                arenas.append(_describe(number, path, descriptor, described=described))
    return arenas


def arenas_of(pids: Collection[int], *, described: bool = False) -> list[ArenaInfo]:
    """Return the arenas whose owners are alive and among `pids`.

    Args:
        pids: Process ids of the owners, in the PID namespace of this process.
        described: Has the same meaning as in `survey`.

    Raises:
        SharedMemoryError: /dev/shm cannot be read, or /proc is not mounted.

    """
    namespace = layout.Owner.current().pid_namespace
    return [
        arena
        for arena in survey(described=described)
        if arena.alive and arena.owner and arena.owner.pid in pids and arena.owner.pid_namespace == namespace
    ]


def arena_files() -> list[tuple[int, Path]]:
    """Return the arena number and path of every file in /dev/shm that has an arena's name.

    This function does not open the files. `opened` checks whether a file is an arena and belongs to this user.
    """
    with os_errors_as(SharedMemoryError, f"{layout.SHM_DIRECTORY} cannot be read"):
        names = sorted(os.listdir(layout.SHM_DIRECTORY))  # noqa: PTH208 - a Path for each of thousands of files is slow
    matches = [(_FILE_NAME.fullmatch(name), name) for name in names]
    return [(int(match[1], 16), layout.SHM_DIRECTORY / name) for match, name in matches if match]


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int | None]:
    """Open an arena of this user, as a context manager.

    Yields:
        The descriptor, or None if the file no longer exists or is not an arena of this user.

    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # the file was removed, is a symbolic link, or belongs to another user
        yield None
        return
    try:
        ours = os.fstat(descriptor).st_uid == os.geteuid() and _first_bytes(descriptor) == layout.MAGIC
        yield descriptor if ours else None
    finally:
        os.close(descriptor)


def _first_bytes(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, len(layout.MAGIC), 0)
    except OSError:  # a directory or a pipe
        return b""


def _describe(number: int, path: Path, descriptor: int, *, described: bool) -> ArenaInfo:
    alive = is_locked(descriptor)
    status = os.fstat(descriptor)
    try:
        header = layout.ArenaHeader.read(descriptor, status)
        blocks = tuple(_blocks(descriptor, header, described=described))
        stats = layout.ArenaStats.read(descriptor)
    except SegmentMissing:
        return ArenaInfo(number, str(path), None, alive, 0.0, status.st_size, 0, 0, (), None)
    return ArenaInfo(
        number=number,
        file=str(path),
        owner=header.owner,
        alive=alive,
        age_s=max(0.0, (time.time_ns() - header.created_ns) / 1e9),
        file_bytes=header.file_bytes,
        capacity_bytes=header.capacity_bytes,
        used_bytes=sum(block.num_bytes for block in blocks),
        blocks=blocks,
        stats=stats,
    )


def _blocks(descriptor: int, header: layout.ArenaHeader, *, described: bool) -> Iterator[BlockInfo]:
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    # Read the table and the release words with one call, so that the snapshot is as consistent as possible.
    table = os.pread(descriptor, header.data_offset - layout.PAGE, layout.PAGE)
    if len(table) < header.data_offset - layout.PAGE:
        raise SegmentMissing("the arena's file was truncated in the meantime")
    control = memoryview(table).cast("Q")
    releases = control[(header.releases_offset - layout.PAGE) // 8 :]
    state_words = control[layout.STATE : layout.WORDS_PER_ENTRY * header.num_entries : layout.WORDS_PER_ENTRY].tolist()
    capacity_bytes, file_bytes = header.capacity_bytes, header.file_bytes
    for block, word in enumerate(state_words):
        generation, state = word >> 8, word & 0xFF
        if not layout.FREE < state <= layout.PUBLISHED or releases[1 + block] == generation:
            continue
        entry = control[layout.WORDS_PER_ENTRY * block : layout.WORDS_PER_ENTRY * (block + 1)]
        start, size = min(entry[layout.OFFSET], file_bytes), min(entry[layout.SIZE], capacity_bytes)
        own = _block_header(descriptor, block, generation, start, size) if described else None
        yield BlockInfo(
            block=block,
            generation=generation,
            state=layout.STATE_NAMES[state],
            num_bytes=size,
            pieces=_pieces(control, header, block),
            arrays={name: array.spec for name, array in own.arrays.items()} if own else {},
            request=own.request if own else "",
            age_s=max(0.0, (now_ns - entry[layout.ALLOCATED_NS]) / 1e9),
        )


def _pieces(control: memoryview, header: layout.ArenaHeader, block: int) -> layout.Pieces:
    """Return a block's pieces, with offsets from the start of the data region.

    The pieces are clipped to this region, because the owner may change the entries while they are read.
    """
    room = range(header.data_offset, header.file_bytes)
    return tuple(
        layout.Extent(offset - room.start, min(nbytes, room.stop - offset))
        for offset, nbytes in layout.read_pieces(control, header.num_entries, block)
        if offset in room and nbytes > 0
    )


def _block_header(descriptor: int, block: int, generation: int, start: int, size: int) -> BlockHeader | None:
    """Return a block's header, or None if it cannot be read or has another generation."""
    try:
        header = BlockHeader.unpack(_FileBytes(descriptor), start, start + size)
        header.require(block, generation)
    except DamagedHeaderError:
        return None
    return header


class _FileBytes:
    """Bytes of a file. A slice is read from the file when it is requested."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __getitem__(self, key: slice) -> bytes:
        return os.pread(self._descriptor, key.stop - key.start, key.start)
