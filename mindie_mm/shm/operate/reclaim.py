"""The collector: takes from /dev/shm what belongs to the dead, says why, and leaves everything else alone."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal, get_args

from mindie_mm.errors import MindieMMError
from mindie_mm.processes import faults
from mindie_mm.shm.format.layout import PUBLISHED, STATE_NAMES, Owner, block_name
from mindie_mm.shm.format.ref import Ref
from mindie_mm.shm.memory.liveness_lock import lock_of_the_dead, unlink_same
from mindie_mm.shm.memory.segment import segment_bytes, unlink_segment
from mindie_mm.shm.operate.arena_info import BlockInfo, arena_files, opened, survey
from mindie_mm.shm.reader.mapped import drop_removed
from mindie_mm.shm.reader.view import release_block
from mindie_mm.shm.requests.path_file import PATH_FILE_NAME, read_contents
from mindie_mm.shm.requests.spool import collect_request, request_directories

_log = logging.getLogger(__name__)

Cause = Literal["owner_dead", "request_dead", "request_gone", "lease_expired", "path_file"]
"""An arena whose owner is dead; a request directory that no process holds; a block whose path file is gone; a block
whose lease ran out; a block, or a segment of MindIE's wire, in a path file that the operator gave up."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """One thing that was taken back, or would be."""

    cause: Cause
    what: str
    """The path of an arena or a request directory, a block (`mindie_mm-1f2a:17`), or a segment (`psm_8c9d4828`)."""
    num_bytes: int
    """Shared memory that it held."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection took back, or would have."""

    reclaimed: tuple[Reclaimed, ...]
    failures: tuple[str, ...]
    """What could not be reclaimed, and why; the next collection tries again."""

    @property
    def num_bytes(self) -> int:
        """Shared memory of all of it."""
        return sum(one.num_bytes for one in self.reclaimed)

    @property
    def counts(self) -> dict[Cause, int]:
        """How many things were taken back, by cause."""
        return dict(Counter(one.cause for one in self.reclaimed))

    def of(self, cause: Cause) -> tuple[str, ...]:
        """What was taken back for `cause`."""
        return tuple(one.what for one in self.reclaimed if one.cause == cause)


@dataclass(frozen=True, slots=True)
class Total:
    """What was reclaimed for one cause."""

    number: int = 0
    """Things reclaimed."""
    num_bytes: int = 0
    """Shared memory that they held."""


_totals: dict[Cause, Total] = dict.fromkeys(CAUSES, Total())
_totals_lock = Lock()


def totals() -> dict[Cause, Total]:
    """What this process has reclaimed since it began, by cause, whichever part of it asked: for metrics."""
    with _totals_lock:
        return dict(_totals)


def collect(request_roots: Iterable[Path] = (), *, dry_run: bool = False) -> Collected:
    """Reclaims what belongs to the dead, and nothing else:

    below each of `request_roots`, request directories that no process holds; arenas whose owner holds no lock;
    published blocks of living arenas whose lease ran out, or whose path file is gone, where it would be seen from
    here. `dry_run` decides the same and changes nothing. What cannot be reclaimed is logged, and left for next time.
    """
    collection = _Collection(dry_run=dry_run)
    for root in request_roots:
        collection.take_requests(root)
    collection.take_arenas()
    collection.take_blocks()
    return collection.result()


def collect_path_file(path_file: Path, *, dry_run: bool = False) -> Collected:
    """Frees what a path file names, whoever still needs it; the file stays. Idempotent.

    InputError if it cannot be read. Lines that are no reference are failures.
    """
    collection = _Collection(dry_run=dry_run)
    collection.take_path_file(path_file)
    return collection.result()


class _Collection:
    """One collection on its way."""

    def __init__(self, *, dry_run: bool) -> None:
        self._dry_run = dry_run
        self._reclaimed: list[Reclaimed] = []
        self._failures: list[str] = []

    def result(self) -> Collected:
        """All of it."""
        drop_removed()
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
        here = None
        with self._going_on("blocks without a request"):  # without an owner, only expired leases are reclaimed
            here = Owner.current()
        for arena in (arena for arena in survey() if arena.alive):
            paths_are_ours = here is not None and arena.owner is not None and _has_same_paths(arena.owner, here)
            for block in arena.blocks:
                with self._going_on(block_name(arena.number, block.block)):
                    cause = _why_orphaned(block, paths_are_ours=paths_are_ours)
                    if cause is not None:
                        self._free(cause, arena.ref(block), block.num_bytes)

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
        if self._dry_run or release_block(ref):
            self._add(cause, block_name(ref.arena, ref.block), num_bytes)

    def _unlink_if_dead(self, path: Path, descriptor: int) -> bool:
        return lock_of_the_dead(descriptor) and (self._dry_run or unlink_same(path, descriptor))

    def _add(self, cause: Cause, what: str, num_bytes: int) -> None:
        self._reclaimed.append(Reclaimed(cause, what, num_bytes))
        if not self._dry_run:
            with _totals_lock:
                total = _totals[cause]
                _totals[cause] = Total(total.number + 1, total.num_bytes + num_bytes)

    @contextmanager
    def _going_on(self, what: object) -> Iterator[None]:
        """What cannot be collected keeps nothing else from it."""
        try:
            yield
        except (MindieMMError, OSError) as error:
            _log.warning("collecting %s: %s", what, error)
            self._failures.append(f"{what}: {error}")


def _why_orphaned(block: BlockInfo, *, paths_are_ours: bool) -> Cause | None:
    """Only of published blocks: one being filled may not have its line yet."""
    if block.state != STATE_NAMES[PUBLISHED]:
        return None
    if not block.request:
        return "lease_expired" if block.lease_s is not None and block.lease_s <= 0 else None
    return "request_gone" if paths_are_ours and _is_gone(block.request) else None


def _has_same_paths(owner: Owner, here: Owner) -> bool:
    """Whether a path is one file to both: not in another container, or a chroot. False where that cannot be told."""
    namespaces = (here.mount_namespace, here.pid_namespace)
    if (owner.mount_namespace, owner.pid_namespace) != namespaces:
        return False
    with suppress(OSError):
        return Path(f"/proc/{owner.pid}/root").samefile("/")
    return False


def _is_gone(path: str) -> bool:
    """OSError where that cannot be told, as without permission: a living request's file may lie there."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except ValueError:  # a NUL byte: no request has such a path, the block's header was written over
        return False
    return False


def _blocks_in_use() -> Mapping[Ref, int]:
    """Bytes of every block that nobody freed."""
    return {arena.ref(block): block.num_bytes for arena in survey() for block in arena.blocks}


def _bytes_named(path_file: Path, used: Mapping[Ref, int]) -> int:
    try:
        contents = read_contents(path_file)
    except MindieMMError:  # whoever collects it says so
        return 0
    blocks = sum(used.get(ref, 0) for ref in contents.refs)
    return blocks + sum(segment_bytes(name) or 0 for name in contents.segments)
