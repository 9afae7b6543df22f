"""Layout of an arena file (docs/wire-format.md): header page, table of entries, release words, data.

    0                header: one page; the owner's counters begin at byte 512
    one page         table: 64 bytes per entry: state word, offset, size, allocation time, reserved, next piece
    releases_offset  release words: the doorbell, then one word per entry, on separate pages; any process may write them
    data_offset      blocks, aligned to pages

All numbers are little-endian. Reads and writes of 8-byte words are atomic.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Self
from uuid import UUID

from mindie_mm.errors import SegmentMissing, SharedMemoryError
from mindie_mm.shm.format.words import MAX_BLOCK

assert sys.byteorder == "little", "the words in an arena are read in place"

SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - the folder of POSIX shared memory on Linux
PAGE = mmap.PAGESIZE
"""Page size of the machine: 4096, or 65,536 on some aarch64 machines. Regions of an arena are aligned to pages."""
ALIGNMENT = 64

MAGIC = b"mindieMM"
VERSION = 1
_HEADER = struct.Struct("<8sIIIIQQQQQQ16sQQQ")
_CRC = struct.Struct("<I")

ENTRY_BYTES = 64
WORDS_PER_ENTRY = ENTRY_BYTES // 8
STATE, OFFSET, SIZE, ALLOCATED_NS, _, NEXT = range(6)
"""Indices of the words of an entry.

- STATE: `generation << 8 | state`.
- OFFSET: Offset in the file in bytes.
- SIZE: Size in bytes. In the block's own entry, this is the size of all pieces together.
- ALLOCATED_NS: Time of allocation on CLOCK_BOOTTIME.
- The next word is reserved, and is 0.
- NEXT: 1 + the entry of the block's next piece. 0 for no next piece.
"""

FREE, FILLING, PUBLISHED, PIECE = range(4)
STATE_NAMES = ("free", "filling", "published", "piece")

MIN_ENTRIES = 64
BYTES_PER_ENTRY = 1 << 16
"""Bytes of capacity per table entry. The name word limits the number of entries to MAX_BLOCK + 1."""

DOORBELL = 0
"""Index of the word that asks the owner to check the release words. The release word of entry n is at 1 + n."""


def file_name(arena: int) -> str:
    """Return the name of the arena's file in SHM_DIRECTORY."""
    return f"mindie_mm-{arena:04x}"


def block_name(arena: int, block: int) -> str:
    """Return a block's name for messages, such as "mindie_mm-00ff:3"."""
    return f"{file_name(arena)}:{block}"


def round_up(size: int, unit: int) -> int:
    """Return `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def state_word(generation: int, state: int) -> int:
    """Return the state word of an entry. The lowest 8 bits are the state, and the bits above are the generation."""
    return generation << 8 | state


def fence() -> None:
    """Issue a full memory barrier, also on processors with weak memory ordering.

    Releasing a lock and acquiring it again is the only full barrier that Python offers. Each call uses a new lock.
    A signal handler that raises in this function therefore cannot leave a shared lock acquired.
    """
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def require_own(status: os.stat_result) -> None:
    """Raise SegmentMissing if another user owns the file."""
    if status.st_uid != os.geteuid():
        raise SegmentMissing(f"the file belongs to user {status.st_uid}; this process runs as user {os.geteuid()}")


@contextmanager
def needing_proc() -> Iterator[None]:
    """Raise SharedMemoryError if the `with` block fails because /proc is not mounted, for example in a chroot."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SharedMemoryError("shared memory needs /proc, which is not mounted: mount -t proc proc /proc") from error


@dataclass(frozen=True, slots=True)
class Owner:
    """Process that created an arena.

    Use these fields for display. Only the arena's lock shows whether the owner is alive.
    """

    pid: int
    """Process id in the owner's own PID namespace."""
    start_time: int
    """Clock ticks from boot to the start of the process."""
    boot_id: str
    pid_namespace: int
    """Inode of /proc/self/ns/pid."""
    mount_namespace: int
    """Inode of /proc/self/ns/mnt. Paths in block headers are valid in this namespace."""

    @classmethod
    def current(cls) -> Owner:
        """Return this process as an owner. Raise SharedMemoryError if /proc is not mounted."""
        with needing_proc():
            stat = Path("/proc/self/stat").read_text(encoding="utf-8")
            return cls(
                pid=os.getpid(),
                start_time=int(stat.rpartition(")")[2].split()[19]),
                boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
                pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
                mount_namespace=Path("/proc/self/ns/mnt").stat().st_ino,
            )


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """Contents of an arena's first page."""

    arena: int
    num_entries: int
    capacity_bytes: int
    """Bytes available for blocks."""
    created_ns: int
    """Time of creation in nanoseconds since the Unix epoch."""
    owner: Owner

    @classmethod
    def plan(cls, capacity_bytes: int, created_ns: int, owner: Owner) -> ArenaHeader:
        """Return the header of a new arena, with the capacity rounded up to whole pages.

        The arena number is 0 until the caller replaces it.
        """
        num_entries = min(max(capacity_bytes // BYTES_PER_ENTRY, MIN_ENTRIES), MAX_BLOCK + 1)
        return cls(0, num_entries, round_up(capacity_bytes, PAGE), created_ns, owner)

    @property
    def releases_offset(self) -> int:
        """Offset of the release words in the file, in bytes."""
        return PAGE + round_up(self.num_entries * ENTRY_BYTES, PAGE)

    @property
    def releases_bytes(self) -> int:
        """Size of the region of release words in bytes, a multiple of the page size."""
        return round_up((1 + self.num_entries) * 8, PAGE)

    @property
    def data_offset(self) -> int:
        """Offset of the blocks in the file, in bytes."""
        return self.releases_offset + self.releases_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file in bytes."""
        return self.data_offset + self.capacity_bytes

    def pack(self) -> bytes:
        """Return the header as bytes, with its checksum. The rest of its page is zero."""
        owner = self.owner
        body = _HEADER.pack(
            MAGIC,
            VERSION,
            self.arena,
            self.num_entries,
            ENTRY_BYTES,
            self.releases_offset,
            self.data_offset,
            self.capacity_bytes,
            self.created_ns,
            owner.pid,
            owner.start_time,
            UUID(owner.boot_id).bytes,
            owner.pid_namespace,
            owner.mount_namespace,
            0,
        )
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def read(cls, descriptor: int, status: os.stat_result) -> ArenaHeader:
        """Read the header of an open file.

        Raises:
            SegmentMissing: The file is not an arena, is damaged or truncated, or has a layout for another page size.

        """
        return cls.unpack(os.pread(descriptor, PAGE, 0), status.st_size)

    def require(self, arena: int) -> None:
        """Raise SegmentMissing unless this is the header of arena number `arena`."""
        if self.arena != arena:
            raise SegmentMissing(f"the header of the file belongs to another arena, {file_name(self.arena)}")

    @classmethod
    def unpack(cls, page: bytes, file_bytes: int) -> ArenaHeader:
        """Parse a header from the file's first page and the file's size. Raise the same errors as `read`."""
        body = page[: _HEADER.size]
        if len(page) < _HEADER.size + _CRC.size or body[: len(MAGIC)] != MAGIC:
            raise SegmentMissing("the file is not an arena")
        if zlib.crc32(body) != _CRC.unpack_from(page, _HEADER.size)[0]:
            raise SegmentMissing("the header of the arena is damaged")
        (_, version, arena, num_entries, entry_bytes, releases_offset, data_offset, capacity, created_ns, *owner) = (
            _HEADER.unpack(body)
        )
        if version != VERSION:
            raise SegmentMissing(f"the arena has format version {version}; this program reads version {VERSION}")
        pid, start_time, boot_id, pid_namespace, mount_namespace, _ = owner
        header = cls(
            arena,
            num_entries,
            capacity,
            created_ns,
            Owner(pid, start_time, str(UUID(bytes=boot_id)), pid_namespace, mount_namespace),
        )
        layout = (ENTRY_BYTES, header.releases_offset, header.data_offset)
        if not 0 < num_entries <= MAX_BLOCK + 1 or (entry_bytes, releases_offset, data_offset) != layout:
            raise SegmentMissing(f"the arena's header is not laid out in pages of {PAGE} bytes")
        if file_bytes != header.file_bytes:
            raise SegmentMissing(
                f"the arena's file has {file_bytes} bytes, but its header requires {header.file_bytes}"
            )
        return header


class Extent(NamedTuple):
    """Range of bytes in a file."""

    offset: int
    nbytes: int


Pieces = tuple[Extent, ...]
"""Extents of a block. Concatenated in this order, they form the block."""


def read_pieces(entries: memoryview, num_entries: int, block: int) -> Pieces:
    """Read the pieces of a block from the arena's table (docs/wire-format.md, 2.3).

    The table is not trusted, because its words can have any values. The size of the first piece is the size in the
    block's own entry minus the sizes of all other pieces. In a damaged table, this size can be 0 or negative.

    Returns:
        The pieces, or an empty tuple if a link points outside the table or the links form a cycle.

    """
    at = WORDS_PER_ENTRY * block
    offset, left, behind = entries[at + OFFSET], entries[at + SIZE], entries[at + NEXT]
    pieces: list[Extent] = []
    while behind:
        if behind > num_entries or len(pieces) == num_entries:
            return ()
        at = WORDS_PER_ENTRY * (behind - 1)
        pieces.append(Extent(entries[at + OFFSET], entries[at + SIZE]))
        left -= pieces[-1].nbytes
        behind = entries[at + NEXT]
    return (Extent(offset, left), *pieces)


STATS_OFFSET = 512
"""Offset of the counters in the arena's first page, in bytes."""

POPULATED, USED, PEAK, ALLOCATIONS, WAITS, FULL, TAKEN_BACK, WAITING, WAITED_NS = range(9)
"""Indices of the counters, in the order of the fields of `ArenaStats`."""

_WORDS = struct.Struct("<9Q")
STATS_BYTES = _WORDS.size


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Counters of an arena.

    The owner can change the counters while they are being read. Each value is exact, but two values can be from
    different moments.
    """

    populated_bytes: int
    """Number of bytes at the start of the arena's file whose pages have been faulted in."""
    used_bytes: int
    """Bytes in blocks that the owner has not reclaimed. A freed block counts until the owner reclaims it."""
    peak_bytes: int
    """Largest value of `used_bytes` so far."""
    allocations: int
    """Number of blocks allocated so far."""
    waits: int
    """Number of requests, and of direct calls to `Arena.allocate`, that had to wait for room."""
    full: int
    """Number of waits that ended with ArenaFull, because no room became free."""
    taken_back: int
    """Number of published blocks that were freed and reclaimed."""
    waiting_bytes: int
    """Number of bytes that requests are waiting for at the moment."""
    waited_ns: int
    """Total time that requests have waited for room, in nanoseconds."""

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Read the counters of an arena from its open file.

        Raises:
            SegmentMissing: The file is truncated.

        """
        words = os.pread(descriptor, STATS_BYTES, STATS_OFFSET)
        if len(words) < STATS_BYTES:
            raise SegmentMissing(
                f"the arena's file is too short: its counters end at byte {STATS_OFFSET + STATS_BYTES}"
            )
        return cls(*_WORDS.unpack(words))
