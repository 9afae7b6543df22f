"""The batches of each API key, in the folder of the files.

A batch is a folder, `<owner>/batches/<id>/`, with its description, its input and the answers so far. `open/` has an
empty file for each batch that has not ended, so that a service finds these without reading all descriptions.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import Literal

import msgspec

from mindie_mm.errors import LimitExceeded, NotStored
from mindie_mm.processes.writing import sync
from mindie_mm.shm import request_directory
from mindie_mm.shm.liveness_lock import LivenessLock
from service.batches.record import Batch
from service.files.store import OUTPUTS, FileStore, replace_file

_log = logging.getLogger(__name__)

_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}", re.ASCII)
_DESCRIPTION = "batch.json"
_CREATING_S = 60.0
"""Age in seconds at which a marker without a batch is no longer being created, but was left by a dead process."""
_SPARE_BYTES = 64 << 10
"""More than the descriptions of a batch and of its output take."""
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """The folder of a batch."""

    owner: str
    path: Path
    marker: Path
    """File that exists until the batch has ended."""

    @property
    def exists(self) -> bool:
        """True if the batch has a description, perhaps one that cannot be read."""
        return os.path.lexists(self.path / _DESCRIPTION)

    @property
    def input(self) -> Path:
        return self.path / "input.jsonl"

    @property
    def output(self) -> Path:
        return self.path / OUTPUTS[0]

    @property
    def errors(self) -> Path:
        return self.path / OUTPUTS[1]

    @property
    def spare(self) -> Path:
        """File that only occupies room. It is removed if the disk has no other room for the end of the batch."""
        return self.path / "spare"

    @property
    def cancelled_at(self) -> float | None:
        """Unix time at which the client has cancelled the batch, or None."""
        with suppress(FileNotFoundError):
            return self._cancelled.stat().st_mtime
        return None

    def ending(self, batch: Batch) -> Literal["cancelled", "expired"] | None:
        """Return whether the batch is over, although requests have no answer: the first of the two reasons."""
        cancelled_at = self.cancelled_at
        if cancelled_at is not None and cancelled_at < batch.expires_at:
            return "cancelled"
        return "expired" if batch.expires_at <= time.time() else None

    @property
    def _cancelled(self) -> Path:
        return self.path / "cancelled"

    def lock(self) -> LivenessLock | None:
        """Lock the batch for this process. Return None if a live process, perhaps this one, has locked it."""
        return _lock(self.path / "lock")

    def read(self) -> Batch | None:
        """Return the batch as it is stored, or None if it does not exist or cannot be read."""
        path = self.path / _DESCRIPTION
        try:
            return msgspec.json.decode(path.read_bytes(), type=Batch)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.error("the batch in %s is passed over, because its description cannot be read: %s", path, error)
            return None

    def write(self, batch: Batch) -> None:
        """Store the batch. Only the process that holds its lock may do so."""
        replace_file(self.path / _DESCRIPTION, msgspec.json.encode(batch))

    def seen(self) -> Batch | None:
        """Return the batch as its client sees it, or None if it does not exist."""
        batch = self.read()
        if batch is not None and not batch.has_ended and (cancelled_at := self.cancelled_at) is not None:
            batch.times["cancelling"], batch.status = int(cancelled_at), "cancelling"
        return batch

    def cancel(self) -> None:
        """Note that the client has cancelled the batch. The process that runs the batch looks for the note."""
        with suppress(FileExistsError):  # the time of the first note counts
            self._cancelled.touch(exist_ok=False)

    def end(self) -> None:
        """Remove what a batch that has ended does not need."""
        for path in (self.input, self.output, self.errors, self.spare, self._cancelled):
            path.unlink(missing_ok=True)
        self.marker.unlink(missing_ok=True)


class BatchStore:
    """The batches of each API key. Methods access the disk, so call them in a thread. `FileStore` describes `owner`."""

    def __init__(self, files: FileStore, max_batches: int) -> None:
        """Create a store with at most `max_batches` batches of each key."""
        self.files = files
        self._max_batches = max_batches
        self._open = files.root / "open"

    def create(self, owner: str, batch: Batch) -> BatchFolder:
        """Store a new batch with a link to its input, which the client may delete.

        Raises:
            NotStored: The key does not have the input file.
            LimitExceeded: The key has too many batches, or no room for the files of the output.

        """
        with self.files.adding:
            self.files.require_room(owner, num_files=len(OUTPUTS))
            content = self.files.content(self.files.get(owner, batch.input_file_id), owner)
            self._make_room(owner)
            folder = self.folder(owner, batch.id)
            folder.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open.mkdir(mode=0o700, exist_ok=True)
            folder.marker.touch()
            self._write_new(folder, batch, content)
        sync(folder.path.parent)
        return folder

    def _write_new(self, folder: BatchFolder, batch: Batch, content: Path) -> None:
        with request_directory(self.files.uploads) as directory:
            new = BatchFolder(folder.owner, directory.path / "batch", folder.marker)
            new.path.mkdir(mode=0o700)
            try:
                new.input.hardlink_to(content)
            except OSError:  # a file system without hard links
                shutil.copyfile(content, new.input)
            for path in (new.output, new.errors):
                path.touch(mode=0o600)
            new.spare.write_bytes(token_bytes(_SPARE_BYTES))  # random, because file systems may compress
            new.write(batch)
            new.path.rename(folder.path)

    def _make_room(self, owner: str) -> None:
        """Remove the oldest batch that has ended if the key has as many batches as it may have."""
        found = self.batches(owner)
        if len(found) < self._max_batches:
            return
        ended = next((batch for batch in found if batch.has_ended), None)
        if ended is None:
            raise LimitExceeded(
                f"this API key has {len(found)} batches in progress; the limit is {self._max_batches} "
                "(--max-files-per-key). Wait until a batch has ended, or cancel one"
            )
        shutil.rmtree(self.folder(owner, ended.id).path, ignore_errors=True)

    def get(self, owner: str, batch_id: str) -> tuple[BatchFolder, Batch]:
        """Return a batch with its folder. Raise NotStored if the key has no batch with this id."""
        if _BATCH_ID.fullmatch(batch_id):
            folder = self.folder(owner, batch_id)
            if (batch := folder.seen()) is not None:
                return folder, batch
        raise NotStored(f"the batch {batch_id[:_MAX_SHOWN]!r} does not exist")

    def batches(self, owner: str) -> list[Batch]:
        """Return the key's batches, the oldest first."""
        paths = (self.files.root / owner / "batches").glob("batch_*")
        found = [self.folder(owner, path.name).seen() for path in paths]
        return sorted((batch for batch in found if batch is not None), key=lambda one: (one.created, one.id))

    def lock(self, owner: str) -> LivenessLock | None:
        """Lock the key's batches, because one runs at a time. Return None if a live process has locked them."""
        return _lock(self.files.root / owner / "batches" / "lock")

    def unfinished(self) -> Iterator[tuple[str, Batch]]:
        """Yield each batch that has not ended, with its owner."""
        if not self._open.exists():
            return
        for marker in self._open.iterdir():
            owner, _, batch_id = marker.name.partition(".")
            folder = self.folder(owner, batch_id)
            batch = folder.read()
            if batch is not None and not batch.has_ended:
                yield owner, batch
            elif batch is not None or (_age_s(marker) > _CREATING_S and not folder.exists):
                folder.end()

    def folder(self, owner: str, batch_id: str) -> BatchFolder:
        """Return the folder of a batch, which need not exist."""
        return BatchFolder(owner, self.files.root / owner / "batches" / batch_id, self._open / f"{owner}.{batch_id}")


def _lock(path: Path) -> LivenessLock | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return LivenessLock(descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise


def new_id() -> str:
    """Return the id of a new batch."""
    return f"batch_{token_hex(12)}"


def _age_s(path: Path) -> float:
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0
