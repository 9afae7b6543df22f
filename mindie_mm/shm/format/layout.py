"""The bytes of an arena file (docs/wire-format.md): header page, table of entries, release words, data.

    0                header: one page; from byte 512 what the owner counts (stats.py)
    one page         table: 64 bytes an entry: state word, offset, size, time of allocation, end of lease, next piece
    releases_offset  release words: the doorbell, then one word an entry; a page of its own, for every process to write
    data_offset      blocks, on page boundaries

Everything is little-endian. A word of 8 bytes is written and read whole.
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
from uuid import UUID

from mindie_mm.errors import SegmentMissing, SharedMemoryError
from mindie_mm.shm.format.words import MAX_BLOCK

assert sys.byteorder == "little", "the words in an arena are read in place"

SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies on Linux
PAGE = mmap.PAGESIZE
"""4096, and 65,536 on some aarch64: what is mapped by itself lies on pages of the machine."""
DISK_PAGE = 4096
"""Page of a file on disk, whatever the machine's: equal content makes equal bytes, and any machine reads them. Such a
file is only ever mapped whole."""
ALIGNMENT = 64

MAGIC = b"mindieMM"
VERSION = 1
_HEADER = struct.Struct("<8sIIIIQQQQQQ16sQQQ")
_CRC = struct.Struct("<I")

ENTRY_BYTES = 64
WORDS_PER_ENTRY = ENTRY_BYTES // 8
STATE, OFFSET, SIZE, ALLOCATED_NS, EXPIRES_NS, NEXT = range(6)
"""Places of an entry's words: (generation << 8 | state), offset in the file, bytes, two times of CLOCK_BOOTTIME, link.

EXPIRES_NS is the end of a block's lease, for blocks without a request; 0 if it has none. NEXT is 1 + the entry of the
block's next piece; 0 if there is none. The SIZE of a block's own entry is that of all its pieces.
"""

FREE, FILLING, PUBLISHED, PIECE = range(4)
STATE_NAMES = ("free", "filling", "published", "piece")

MIN_ENTRIES = 64
BYTES_PER_ENTRY = 1 << 16
"""The table has an entry for each so many bytes of capacity, up to the number of entries that a word can name."""

DOORBELL = 0
"""Place of the word that tells the owner that a release word was written; entry n's own word is at 1 + n."""


def file_name(arena: int) -> str:
    """The file of arena number `arena`, in SHM_DIRECTORY."""
    return f"mindie_mm-{arena:04x}"


def block_name(arena: int, block: int) -> str:
    """How people name a block."""
    return f"{file_name(arena)}:{block}"


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def state_word(generation: int, state: int) -> int:
    return generation << 8 | state


def fence() -> None:
    """Orders memory accesses before a call against those after it, on processors with weak ordering too.

    A release of a lock followed by its acquisition is a full barrier; Python has no other. A lock of the call's own:
    whatever a signal handler raises in here, the next call finds nothing of it.
    """
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def require_own(status: os.stat_result) -> None:
    """SegmentMissing for another user's file."""
    if status.st_uid != os.geteuid():
        raise SegmentMissing(f"the file is user {status.st_uid}'s; this process is user {os.geteuid()}'s")


@contextmanager
def needing_proc() -> Iterator[None]:
    """Raise SharedMemoryError if the block fails because /proc is not mounted, as in a chroot."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SharedMemoryError("shared memory needs /proc, which is not mounted: mount -t proc proc /proc") from error


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that made an arena: for people; whether it lives is told by its lock alone."""

    pid: int
    """Its number in the owner's own pid namespace."""
    start_time: int
    """Clock ticks from boot to the start of the process."""
    boot_id: str
    pid_namespace: int
    """Inode of /proc/self/ns/pid."""
    mount_namespace: int
    """Inode of /proc/self/ns/mnt: paths in block headers are the owner's."""

    @classmethod
    def nobody(cls) -> Owner:
        """The owner that a file on disk states: equal content makes equal bytes."""
        return cls(0, 0, str(UUID(int=0)), 0, 0)

    @classmethod
    def current(cls) -> Owner:
        """Return the running process. Raise SharedMemoryError if /proc is not mounted."""
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
    """What stands in an arena's first page."""

    arena: int
    num_entries: int
    capacity_bytes: int
    """Bytes for blocks."""
    created_ns: int
    """Wall clock, ns since 1970."""
    owner: Owner
    page_bytes: int = PAGE
    """What everything is rounded up to; DISK_PAGE of a file on disk."""

    @classmethod
    def plan(cls, capacity_bytes: int, created_ns: int, owner: Owner, page_bytes: int = PAGE) -> ArenaHeader:
        """The header of a new arena, its number still 0; the capacity is rounded up to whole pages."""
        num_entries = min(max(capacity_bytes // BYTES_PER_ENTRY, MIN_ENTRIES), MAX_BLOCK + 1)
        return cls(0, num_entries, round_up(capacity_bytes, page_bytes), created_ns, owner, page_bytes)

    @property
    def releases_offset(self) -> int:
        return self.page_bytes + round_up(self.num_entries * ENTRY_BYTES, self.page_bytes)

    @property
    def releases_bytes(self) -> int:
        return round_up((1 + self.num_entries) * 8, self.page_bytes)

    @property
    def data_offset(self) -> int:
        return self.releases_offset + self.releases_bytes

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.capacity_bytes

    def pack(self) -> bytes:
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
    def read(cls, descriptor: int, status: os.stat_result, page_bytes: int = PAGE) -> ArenaHeader:
        """Reads the header of an open file; SegmentMissing if it is no arena, damaged, cut short or of another page."""
        return cls.unpack(os.pread(descriptor, page_bytes, 0), status.st_size, page_bytes)

    def require(self, arena: int) -> None:
        """SegmentMissing unless it is this arena's header."""
        if self.arena != arena:
            raise SegmentMissing(f"its header names arena {file_name(self.arena)}")

    @classmethod
    def unpack(cls, page: bytes, file_bytes: int, page_bytes: int = PAGE) -> ArenaHeader:
        """As `read`, from the first page and the size of the file."""
        body = page[: _HEADER.size]
        if len(page) < _HEADER.size + _CRC.size or body[: len(MAGIC)] != MAGIC:
            raise SegmentMissing("the file is no arena")
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
            page_bytes,
        )
        layout = (ENTRY_BYTES, header.releases_offset, header.data_offset)
        if not 0 < num_entries <= MAX_BLOCK + 1 or (entry_bytes, releases_offset, data_offset) != layout:
            raise SegmentMissing(f"the arena's header is not laid out in pages of {page_bytes} bytes")
        if file_bytes != header.file_bytes:
            raise SegmentMissing(f"the arena's file has {file_bytes} bytes, its header says {header.file_bytes}")
        return header
