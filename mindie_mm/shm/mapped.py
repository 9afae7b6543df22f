"""The arenas that this process reads. Each arena is mapped once."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
from collections.abc import Callable
from threading import Lock
from weakref import finalize

from mindie_mm.errors import CorruptReference, SegmentMissing, SharedMemoryError, StaleReference
from mindie_mm.shm.format import layout
from mindie_mm.shm.format.block import MAX_HEADER_BYTES, BlockHeader, Buffer, DamagedHeaderError
from mindie_mm.shm.format.words import Ref
from mindie_mm.shm.mapping import MADV_POPULATE_READ, Populator, map_pieces
from mindie_mm.shm.segment import NOT_OURS

_log = logging.getLogger(__name__)


class MappedArena:
    """Mapping of an arena for readers. Only the release words are writable."""

    def __init__(self, number: int) -> None:
        """Map the arena with this number.

        Raises:
            SegmentMissing: The file does not exist, is not an arena, is damaged or belongs to another user.
            SharedMemoryError: The file cannot be mapped.

        """
        path = layout.SHM_DIRECTORY / layout.file_name(number)
        try:
            # Do not follow links in /dev/shm, where any user can create them.
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            kind = SegmentMissing if error.errno in (errno.ENOENT, *NOT_OURS) else SharedMemoryError
            raise kind(f"{path} cannot be opened: {error.strerror}") from error
        # `is_intact` needs the descriptor. When the finalizer closes it, no thread can be inside `is_intact` any more.
        finalize(self, os.close, descriptor).atexit = False
        self._descriptor = descriptor
        try:
            status = os.fstat(descriptor)
            _require_regular(status)
            layout.require_own(status)
            header = layout.ArenaHeader.read(descriptor, status)
            header.require(number)
            self.map = mmap.mmap(descriptor, header.file_bytes, prot=mmap.PROT_READ)
            releases = memoryview(mmap.mmap(descriptor, header.releases_bytes, offset=header.releases_offset))
        except SegmentMissing as error:
            raise SegmentMissing(f"{path}: {error}") from error
        except OSError as error:
            raise SharedMemoryError(f"{path} cannot be mapped: {error.strerror}") from error
        self.header = header
        self._file_bytes, self._num_entries = header.file_bytes, header.num_entries
        self._entries = memoryview(self.map)[layout.PAGE : header.releases_offset].cast("Q")
        self._releases = releases.cast("Q")
        self._populator: Populator | None = None
        self._closing: list[Callable[[], object]] = []

    def writable_pages(self) -> mmap.mmap | None:
        """Map the whole file again as writable memory, because device drivers cannot pin read-only memory.

        Do not write to the mapping: only the owner writes blocks.

        Returns:
            The mapping, or None if the file has been removed or cannot be mapped. If the file has been removed, this
            object may be closed already. A cleanup that unregisters the memory would then never run.

        """
        if not self.is_intact():
            return None
        try:
            return mmap.mmap(self._descriptor, self._file_bytes)
        except OSError:
            return None

    @property
    def has_cleanups(self) -> bool:
        """True if `before_close` has registered an action, such as one that unregisters pinned pages."""
        return bool(self._closing)

    def before_close(self, action: Callable[[], object]) -> None:
        """Register an action that `close` will call. If the action raises an exception, `close` logs it."""
        self._closing.append(action)

    def is_intact(self) -> bool:
        """Return whether the file still has a name and its original size. This takes one fstat call.

        If the link count is 0, the file was removed or replaced by another file.
        """
        status = os.fstat(self._descriptor)
        return status.st_nlink > 0 and status.st_size == self._file_bytes

    def close(self) -> None:
        """Stop populating, and run the registered actions. The memory stays mapped as long as an array uses it."""
        if self._populator is not None:
            self._populator.stop()
        while self._closing:
            try:
                self._closing.pop()()
            except Exception:  # noqa: BLE001 - if a device fails, the lookup of another arena must still succeed
                _log.exception("closing a mapped arena failed")

    def check(self, ref: Ref) -> None:
        """Raise StaleReference if the block is not published, has another generation or has been freed."""
        if ref.block >= self._num_entries:
            raise StaleReference(f"{ref}: the arena has only {self.header.num_entries} entries for blocks")
        state = self._entries[layout.WORDS_PER_ENTRY * ref.block + layout.STATE]
        if state != layout.state_word(ref.generation, layout.PUBLISHED):
            raise StaleReference(f"{ref}: the block is {_state_name(state)} at generation {state >> 8}")
        if self._releases[1 + ref.block] == ref.generation:
            raise StaleReference(f"{ref}: the block was freed")

    def block(self, ref: Ref) -> tuple[Buffer, int, BlockHeader]:
        """Locate a published block.

        Returns:
            The buffer that contains the block, the block's offset in the buffer, and the block's header.

        Raises:
            StaleReference: The block was freed.
            SegmentMissing: The block's header is damaged.
            CorruptReference: The dtype or shape in the reference differs from that of the block's first array.
            SharedMemoryError: The block's pieces cannot be mapped.

        """
        self.check(ref)
        layout.fence()
        entry = layout.WORDS_PER_ENTRY * ref.block
        base, size = self._entries[entry + layout.OFFSET], self._entries[entry + layout.SIZE]
        buffer: Buffer = self.map
        try:
            if self._entries[entry + layout.NEXT]:
                buffer, base = map_pieces(self._descriptor, self._pieces(ref.block), writable=False), 0
            if isinstance(buffer, memoryview):
                head = buffer[base : base + MAX_HEADER_BYTES].tobytes()
                header = BlockHeader.unpack(head, 0, min(size, self._file_bytes - base))
            else:
                header = BlockHeader.unpack(buffer, base, min(base + size, self._file_bytes))
            header.require(ref.block, ref.generation)
        except DamagedHeaderError as error:
            self.check(ref)  # a block that was freed and reused during the read is stale, not damaged
            raise SegmentMissing(f"{ref}: the block's header is damaged: {error}") from error
        spec = next(iter(header.arrays.values())).spec
        if ref.shape is not None and (ref.dtype, ref.shape) != (spec.dtype, spec.shape):
            raise CorruptReference(
                f"{ref}: the handle words do not fit the first array of the block, which has dtype {spec.dtype} and "
                f"shape {spec.shape}"
            )
        return buffer, base, header

    def _pieces(self, block: int) -> layout.Pieces:
        """Return the block's pieces. Raise DamagedHeaderError unless all are whole pages in the data region."""
        pieces = layout.read_pieces(self._entries, self._num_entries, block)
        if not pieces or any(
            offset % layout.PAGE
            or nbytes % layout.PAGE
            or nbytes < layout.PAGE
            or offset < self.header.data_offset
            or offset + nbytes > self._file_bytes
            for offset, nbytes in pieces
        ):
            raise DamagedHeaderError(
                "the pieces of the block are missing, are not whole pages, or are outside the data of the arena"
            )
        return pieces

    def populate(self) -> None:
        """Fault in the whole mapping once, in the background."""
        if self._populator is None:
            self._populator = Populator(MADV_POPULATE_READ)
            self._populator.start(self.map)

    def free(self, ref: Ref) -> bool:
        """Ask the owner to free a block.

        Returns:
            True if this call asked the owner. False if the block is free already or has another generation.

        """
        if ref.block >= self._num_entries or self._releases[1 + ref.block] == ref.generation:
            return False
        state = self._entries[layout.WORDS_PER_ENTRY * ref.block + layout.STATE]
        if state >> 8 != ref.generation or not layout.FREE < state & 0xFF <= layout.PUBLISHED:
            return False
        self._releases[1 + ref.block] = ref.generation
        layout.fence()
        self._releases[layout.DOORBELL] = 1
        return True


def _require_regular(status: os.stat_result) -> None:
    """Raise SegmentMissing for anything but a regular file, such as a directory or a pipe."""
    if not stat.S_ISREG(status.st_mode):
        raise SegmentMissing("the arena is not a regular file")


def _state_name(state: int) -> str:
    code = state & 0xFF
    return layout.STATE_NAMES[code] if code < len(layout.STATE_NAMES) else f"in the unknown state {code}"


class ArenaCache:
    """Arenas that this process has mapped, by number."""

    def __init__(self) -> None:
        self._arenas: dict[int, MappedArena] = {}
        self._lock = Lock()

    def get(self, arena: int) -> MappedArena:
        """Return an arena, and map it if necessary. If it is mapped already, this takes one fstat call.

        Raises:
            SegmentMissing: In the same cases as `MappedArena`.
            SharedMemoryError: In the same cases as `MappedArena`.

        """
        mapped = self._arenas.get(arena)
        if mapped is not None and mapped.is_intact():
            return mapped
        self.close_removed(cleanups=True)
        with self._lock:
            mapped = self._arenas.get(arena)
            if mapped is None:
                mapped = self._arenas[arena] = MappedArena(arena)
            return mapped

    def close_removed(self, *, cleanups: bool = False) -> bool:
        """Close the arenas whose files have been removed, so that the kernel can free their pages.

        By default, this method is safe in finalizers and at exit. It returns at once if another call holds the lock,
        and does not close arenas that have cleanups, because a cleanup may wait for a device.

        Args:
            cleanups: Whether to wait for the lock, and to close arenas that have cleanups, too.

        Returns:
            Whether any arena was closed.

        """
        if not self._lock.acquire(blocking=cleanups):  # a finalizer may run in the thread that holds the lock
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
        for mapped in gone.values():  # after releasing the lock, because a cleanup may wait for a device
            mapped.close()
        return bool(gone)

    def renew_lock(self) -> None:
        """Replace the lock. The thread that held the old lock does not exist in a forked child."""
        self._lock = Lock()


_cache = ArenaCache()
mapped_arena = _cache.get
close_removed = _cache.close_removed
os.register_at_fork(after_in_child=_cache.renew_lock)
