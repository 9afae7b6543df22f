"""Reclamation of shared memory that belongs to dead processes and requests."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal, get_args

from mindie_mm.errors import MindieMMError
from mindie_mm.processes import faults
from mindie_mm.shm.arena_info import BlockInfo, arena_files, opened, survey
from mindie_mm.shm.format.layout import PUBLISHED, STATE_NAMES, Owner, block_name
from mindie_mm.shm.format.words import Ref
from mindie_mm.shm.liveness_lock import lock_of_the_dead, unlink_same
from mindie_mm.shm.mapped import close_removed
from mindie_mm.shm.path_file import PATH_FILE_NAME, read_contents
from mindie_mm.shm.segment import segment_bytes, unlink_segment
from mindie_mm.shm.spool import collect_request, request_directories
from mindie_mm.shm.view import free_block

_log = logging.getLogger(__name__)

Cause = Literal["owner_dead", "request_dead", "request_gone", "path_file"]
"""Reason why an object is reclaimed.

- owner_dead: The owner of an arena is dead.
- request_dead: No process holds the lock of a request directory.
- request_gone: The path file of a block was removed.
- path_file: The operator released a path file that refers to the block or segment.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Object that a collection reclaimed, or would reclaim in a dry run."""

    cause: Cause
    what: str
    """Path of an arena or request directory, or name of a block (`mindie_mm-1f2a:17`) or segment (`psm_8c9d4828`)."""
    num_bytes: int
    """Number of bytes of shared memory that the object used."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Result of a collection or of a dry run."""

    reclaimed: tuple[Reclaimed, ...]
    failures: tuple[str, ...]
    """Messages for objects that could not be reclaimed. The next collection tries again."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of shared memory that the reclaimed objects used."""
        return sum(one.num_bytes for one in self.reclaimed)

    @property
    def counts(self) -> dict[Cause, int]:
        """Number of reclaimed objects by cause."""
        return dict(Counter(one.cause for one in self.reclaimed))

    def of(self, cause: Cause) -> tuple[str, ...]:
        """Return the names of the objects that were reclaimed for `cause`."""
        return tuple(one.what for one in self.reclaimed if one.cause == cause)


@dataclass(frozen=True, slots=True)
class Total:
    """Number and size of the objects that were reclaimed for one cause."""

    number: int = 0
    """Number of objects."""
    num_bytes: int = 0
    """Number of bytes of shared memory that the objects used."""


_totals: dict[Cause, Total] = dict.fromkeys(CAUSES, Total())
_totals_lock = Lock()


def totals() -> dict[Cause, Total]:
    """Return the totals of all collections since this process started, by cause. The metrics contain these totals."""
    with _totals_lock:
        return dict(_totals)


def collect(
    request_roots: Iterable[Path] = (), *, dry_run: bool = False, report: Callable[[Reclaimed], object] | None = None
) -> Collected:
    """Reclaim shared memory that belongs to dead processes and requests.

    This function removes request directories that no process has locked, and arenas whose owner is dead. It frees a
    published block of a live arena if the block's path file was removed, provided that the arena's owner sees the same
    file system as this process. Failures are logged, and the next collection tries again.

    Args:
        request_roots: Spools to search for request directories.
        dry_run: Whether to report the result without changing anything.
        report: Function to call for each object when it is reclaimed.

    """
    collection = _Collection(dry_run=dry_run, report=report)
    for root in request_roots:
        collection.take_requests(root)
    collection.take_arenas()
    collection.take_blocks()
    return collection.result()


def collect_path_file(path_file: Path, *, dry_run: bool = False) -> Collected:
    """Free all blocks and segments in a path file, even if they are in use. Idempotent.

    The path file itself stays. The result lists invalid lines as failures.

    Args:
        path_file: The path file.
        dry_run: Whether to report the result without changing anything.

    Raises:
        InputError: The file is not a regular file of this user, or cannot be read.
        LimitExceeded: The file is larger than 16 MiB.

    """
    collection = _Collection(dry_run=dry_run)
    collection.take_path_file(path_file)
    return collection.result()


class _Collection:
    def __init__(self, *, dry_run: bool, report: Callable[[Reclaimed], object] | None = None) -> None:
        self._dry_run = dry_run
        self._report = report
        self._reclaimed: list[Reclaimed] = []
        self._failures: list[str] = []

    def result(self) -> Collected:
        """Unmap the removed arenas and return the result."""
        close_removed()
        return Collected(tuple(self._reclaimed), tuple(self._failures))

    def take_requests(self, root: Path) -> None:
        with self._going_on(root):
            used = _blocks_in_use()
            for directory in request_directories(root):
                num_bytes = _bytes_named(directory / PATH_FILE_NAME, used)
                with self._going_on(directory):
                    if collect_request(directory, dry_run=self._dry_run):
                        self._add("request_dead", str(directory), num_bytes)

    def take_arenas(self) -> None:
        for _, path in arena_files():
            faults.point("reclaiming")
            with self._going_on(path), opened(path, os.O_RDWR) as descriptor:
                if descriptor is not None and self._unlink_if_dead(path, descriptor):
                    self._add("owner_dead", str(path), os.fstat(descriptor).st_size)

    def take_blocks(self) -> None:
        with self._going_on("blocks without a request"):
            here = Owner.current()
            for arena in survey():
                if arena.alive and arena.owner is not None and _has_same_paths(arena.owner, here):
                    for block in filter(_is_published_for_a_request, arena.blocks):
                        with self._going_on(block_name(arena.number, block.block)):
                            if _is_gone(block.request):
                                self._free("request_gone", arena.ref(block), block.num_bytes)

    def take_path_file(self, path_file: Path) -> None:
        contents = read_contents(path_file)
        used = _blocks_in_use()
        for ref in contents.refs:
            with self._going_on(block_name(ref.arena, ref.block)):
                if ref in used:
                    self._free("path_file", ref, used[ref])
        for name in contents.segments:
            with self._going_on(name):
                num_bytes = segment_bytes(name)
                if num_bytes is not None and (self._dry_run or unlink_segment(name)):
                    self._add("path_file", name, num_bytes)
        if contents.damaged:
            self._failures.append(f"{path_file}: {contents.damage}")

    def _free(self, cause: Cause, ref: Ref, num_bytes: int) -> None:
        if self._dry_run or free_block(ref):
            self._add(cause, block_name(ref.arena, ref.block), num_bytes)

    def _unlink_if_dead(self, path: Path, descriptor: int) -> bool:
        return lock_of_the_dead(descriptor) and (self._dry_run or unlink_same(path, descriptor))

    def _add(self, cause: Cause, what: str, num_bytes: int) -> None:
        self._reclaimed.append(Reclaimed(cause, what, num_bytes))
        if self._report is not None:
            self._report(self._reclaimed[-1])
        if not self._dry_run:
            with _totals_lock:
                total = _totals[cause]
                _totals[cause] = Total(total.number + 1, total.num_bytes + num_bytes)

    @contextmanager
    def _going_on(self, what: object) -> Iterator[None]:
        """Log and record an error in the body, so that the collection continues with the next object."""
        try:
            yield
        except (MindieMMError, OSError) as error:
            _log.warning("reclaiming %s failed: %s", what, error)
            self._failures.append(f"{what}: {error}")


def _is_published_for_a_request(block: BlockInfo) -> bool:
    """Return whether a block is published and has a path file.

    A block that is being filled is always kept, because it may not be recorded in its path file yet.
    """
    return block.state == STATE_NAMES[PUBLISHED] and block.request != ""


def _has_same_paths(owner: Owner, here: Owner) -> bool:
    """Return whether a path refers to the same file in both processes. In another container or chroot, it does not.

    Return False if this cannot be determined.
    """
    namespaces = (here.mount_namespace, here.pid_namespace)
    if (owner.mount_namespace, owner.pid_namespace) != namespaces:
        return False
    with suppress(OSError):
        return Path(f"/proc/{owner.pid}/root").samefile("/")
    return False


def _is_gone(path: str) -> bool:
    """Return whether a path does not exist. Raise OSError if this cannot be determined."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except ValueError:  # a NUL byte: no request has such a path, so the block's header was overwritten
        return False
    return False


def _blocks_in_use() -> Mapping[Ref, int]:
    """Return the size in bytes of every block that has not been freed."""
    return {arena.ref(block): block.num_bytes for arena in survey() for block in arena.blocks}


def _bytes_named(path_file: Path, used: Mapping[Ref, int]) -> int:
    try:
        contents = read_contents(path_file)
    except MindieMMError:  # the collection of this path file reports the error
        return 0
    blocks = sum(used.get(ref, 0) for ref in contents.refs)
    return blocks + sum(segment_bytes(name) or 0 for name in contents.segments)
