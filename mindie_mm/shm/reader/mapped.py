"""The arenas that this process reads, each mapped once: their tables, blocks and release words."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from weakref import finalize

from mindie_mm.errors import CorruptReference, SegmentMissing, SharedMemoryError, StaleReference
from mindie_mm.shm.format.block_header import MAX_HEADER_BYTES, BlockHeader, DamagedHeaderError
from mindie_mm.shm.format.extent import Pieces, read_pieces
from mindie_mm.shm.format.layout import (
    DISK_PAGE,
    DOORBELL,
    FREE,
    NEXT,
    OFFSET,
    PAGE,
    PUBLISHED,
    SHM_DIRECTORY,
    SIZE,
    STATE,
    STATE_NAMES,
    WORDS_PER_ENTRY,
    ArenaHeader,
    fence,
    file_name,
    require_own,
    state_word,
)
from mindie_mm.shm.format.ref import Ref
from mindie_mm.shm.memory.block import Buffer
from mindie_mm.shm.memory.populate import MADV_POPULATE_READ, Populator
from mindie_mm.shm.memory.scatter import map_file, map_pieces
from mindie_mm.shm.memory.segment import NOT_OURS

_log = logging.getLogger(__name__)


class MappedArena:
    """An arena as another process sees it: all of it read-only, but for its release words."""

    def __init__(self, path: Path, arena: int | None = None) -> None:
        """The arena of that number, or, without one, a file of blocks on disk, whose blocks nobody frees.

        SegmentMissing if there is no such file, or it is no arena, damaged, or, in /dev/shm, another user's;
        SharedMemoryError if it cannot be mapped.
        """
        self._on_disk = arena is None
        # In /dev/shm anybody may put a link; a file on disk is the caller's, who may link to it.
        access = os.O_RDONLY if self._on_disk else os.O_RDWR | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            kind = SegmentMissing if error.errno in (errno.ENOENT, *NOT_OURS) else SharedMemoryError
            raise kind(f"{path} cannot be opened: {error.strerror}") from error
        # Kept for the checks, until no thread can be within one.
        finalize(self, os.close, descriptor).atexit = False
        self._descriptor = descriptor
        try:
            status = os.fstat(descriptor)
            _require_regular(status)
            if arena is not None:
                require_own(status)
            header = ArenaHeader.read(descriptor, status, DISK_PAGE if self._on_disk else PAGE)
            if arena is not None:
                header.require(arena)
            self.map: Buffer
            if self._on_disk:  # its pages may have another size, and nobody writes them
                self.map = map_file(descriptor, header.file_bytes)
                releases = self.map[header.releases_offset : header.data_offset]
            else:
                self.map = mmap.mmap(descriptor, header.file_bytes, prot=mmap.PROT_READ)
                releases = memoryview(mmap.mmap(descriptor, header.releases_bytes, offset=header.releases_offset))
        except SegmentMissing as error:
            raise SegmentMissing(f"{path}: {error}") from error
        except OSError as error:
            raise SharedMemoryError(f"{path} cannot be mapped: {error.strerror}") from error
        self.header = header
        self._file_bytes, self._num_entries = header.file_bytes, header.num_entries
        self._entries = memoryview(self.map)[header.page_bytes : header.releases_offset].cast("Q")
        self._releases = releases.cast("Q")
        self._populator: Populator | None = None
        self._closing: list[Callable[[], object]] = []

    def writable_pages(self) -> mmap.mmap | None:
        """The whole file mapped again, as drivers ask it of memory that they pin; None for one on disk, or no room.

        It is for reading all the same: blocks are their owner's to write. None, too, once the file is removed: nobody
        would take the registration back, for whoever looks for removed arenas may have given this one up before.
        """
        if self._on_disk or not self.is_intact():
            return None
        try:
            return mmap.mmap(self._descriptor, self._file_bytes)
        except OSError:
            return None

    @property
    def has_cleanups(self) -> bool:
        """Whether `before_close` was given any, such as to take back a device's registration of the pages."""
        return bool(self._closing)

    def before_close(self, action: Callable[[], object]) -> None:
        """Has `action` called when the arena is given up."""
        self._closing.append(action)

    def is_intact(self) -> bool:
        """Whether the file still has its name and its size: one system call, fstat.

        An arena's name is given once, and taken when it is removed, or when another file is put in its place.
        """
        status = os.fstat(self._descriptor)
        return status.st_nlink > 0 and status.st_size == self._file_bytes

    def close(self) -> None:
        """Stops background work; the mapping goes with the last array over it."""
        if self._populator is not None:
            self._populator.stop()
        while self._closing:
            try:
                self._closing.pop()()
            except Exception:  # noqa: BLE001 - a device that fails is no failure of whoever looks for another arena
                _log.exception("an arena is given up")

    def check(self, ref: Ref) -> None:
        """StaleReference unless the block is published at the reference's generation, and not freed."""
        if ref.block >= self._num_entries:
            raise StaleReference(f"{ref}: the arena has {self.header.num_entries} blocks")
        state = self._entries[WORDS_PER_ENTRY * ref.block + STATE]
        if state != state_word(ref.generation, PUBLISHED):
            raise StaleReference(f"{ref}: the block is {_state_name(state)} at generation {state >> 8}")
        if self._releases[1 + ref.block] == ref.generation:
            raise StaleReference(f"{ref}: the block was freed")

    def block(self, ref: Ref) -> tuple[Buffer, int, BlockHeader]:
        """What the block lies in, where in it, and its header.

        StaleReference, SegmentMissing, CorruptReference; SharedMemoryError if its pieces cannot be mapped.
        """
        self.check(ref)
        fence()
        entry = WORDS_PER_ENTRY * ref.block
        base, size = self._entries[entry + OFFSET], self._entries[entry + SIZE]
        buffer: Buffer = self.map
        try:
            if self._entries[entry + NEXT]:
                buffer, base = map_pieces(self._descriptor, self._pieces(ref.block), writable=False), 0
            if isinstance(buffer, memoryview):
                head = buffer[base : base + MAX_HEADER_BYTES].tobytes()
                header = BlockHeader.unpack(head, 0, min(size, self._file_bytes - base))
            else:
                header = BlockHeader.unpack(buffer, base, min(base + size, self._file_bytes))
            header.require(ref.block, ref.generation)
        except DamagedHeaderError as error:
            self.check(ref)  # freed and used again while it was read: stale, not damaged
            raise SegmentMissing(f"{ref}: the block's header is damaged: {error}") from error
        spec = next(iter(header.arrays.values())).spec
        if ref.shape is not None and (ref.dtype, ref.shape) != (spec.dtype, spec.shape):
            raise CorruptReference(f"{ref}: the block's first array is {spec.dtype} {spec.shape}")
        return buffer, base, header

    def _pieces(self, block: int) -> Pieces:
        """DamagedHeaderError if they are not whole pages of the data."""
        pieces = read_pieces(self._entries, self._num_entries, block)
        if not pieces or any(
            offset % PAGE
            or nbytes % PAGE
            or nbytes < PAGE
            or offset < self.header.data_offset
            or offset + nbytes > self._file_bytes
            for offset, nbytes in pieces
        ):
            raise DamagedHeaderError("its bytes are not in whole pages of the arena")
        return pieces

    def populate(self) -> None:
        """Fault in the whole mapping once, in the background. A file on disk is instead read as it is used."""
        if self._populator is None and isinstance(self.map, mmap.mmap):
            self._populator = Populator(MADV_POPULATE_READ)
            self._populator.start(self.map)

    def release(self, ref: Ref) -> bool:
        """Asks the owner to free a block; False if it is free already, another generation's, or on disk."""
        if self._on_disk or ref.block >= self._num_entries or self._releases[1 + ref.block] == ref.generation:
            return False
        state = self._entries[WORDS_PER_ENTRY * ref.block + STATE]
        if state >> 8 != ref.generation or not FREE < state & 0xFF <= PUBLISHED:
            return False
        self._releases[1 + ref.block] = ref.generation
        fence()
        self._releases[DOORBELL] = 1
        return True


def _require_regular(status: os.stat_result) -> None:
    """SegmentMissing for a directory or a pipe."""
    if not stat.S_ISREG(status.st_mode):
        raise SegmentMissing("it is no regular file")


def _state_name(state: int) -> str:
    code = state & 0xFF
    return STATE_NAMES[code] if code < len(STATE_NAMES) else f"in state {code}"


class ArenaCache:
    """The arenas that this process maps, each mapped once."""

    def __init__(self) -> None:
        self._arenas: dict[int, MappedArena] = {}
        self._lock = Lock()

    def get(self, arena: int) -> MappedArena:
        """As `MappedArena`; an arena that is mapped costs one fstat."""
        mapped = self._arenas.get(arena)
        if mapped is not None and mapped.is_intact():
            return mapped
        self.drop_removed(cleanups=True)
        with self._lock:
            mapped = self._arenas.get(arena)
            if mapped is None:
                mapped = self._arenas[arena] = MappedArena(SHM_DIRECTORY / file_name(arena), arena)
            return mapped

    def add(self, mapped: MappedArena, number: int, *, reserved: bool) -> None:
        """Puts a mounted file where `number` is looked up. SharedMemoryError if the number is another arena's.

        `reserved`: the arena of that number in /dev/shm is there to keep it for this file.
        """
        self.drop_removed(cleanups=True)
        with self._lock:
            if number in self._arenas or (not reserved and (SHM_DIRECTORY / file_name(number)).exists()):
                raise SharedMemoryError(f"arena number {number} is in use: unmount what has it, or mount elsewhere")
            self._arenas[number] = mapped

    def remove(self, mapped: MappedArena, number: int) -> None:
        """Takes a mounted file out again."""
        with self._lock:
            if self._arenas.get(number) is mapped:
                del self._arenas[number]
        mapped.close()

    def drop_removed(self, *, cleanups: bool = False) -> bool:
        """Gives up the arenas whose files are gone, so that their pages can go too; False if there were none.

        Any thread may call this, also that of a process's end, or whatever runs as garbage is collected; but then what
        another thread looks up is left to the next who calls. Those that a device reads are left to the thread that
        reads, which says `cleanups`.
        """
        if not self._lock.acquire(blocking=cleanups):  # this very thread may have it
            return False
        try:
            gone = {
                number: mapped
                for number, mapped in self._arenas.items()
                if not mapped.is_intact() and (cleanups or not mapped.has_cleanups)
            }
            for number in gone:
                del self._arenas[number]
        finally:
            self._lock.release()
        for mapped in gone.values():  # outside of the lock: a device may be waited for
            mapped.close()
        return bool(gone)

    def renew_lock(self) -> None:
        """For a forked child: whichever thread held the lock, it is not there to release it."""
        self._lock = Lock()


_cache = ArenaCache()
mapped_arena = _cache.get
drop_removed = _cache.drop_removed
os.register_at_fork(after_in_child=_cache.renew_lock)


@contextmanager
def mount(path: Path, number: int | None = None) -> Iterator[int]:
    """Makes a file of blocks on disk (`DiskArena`) readable by this process: yields the number that its words carry.

    `number` is another one, which the words were given (`Ref.to_words`) and an arena of the caller's reserves, so that
    two files of one number can be mounted at once.
    Until it is left, `attach` finds its blocks; arrays that were taken stay readable after. `free` leaves them alone.
    SegmentMissing if it is no complete file of blocks, SharedMemoryError if it cannot be mapped or its number is in
    use here.
    """
    mapped = MappedArena(path)
    taken = mapped.header.arena if number is None else number
    _cache.add(mapped, taken, reserved=number is not None)
    try:
        yield taken
    finally:
        _cache.remove(mapped, taken)
