"""The files of each API key, in a folder that several workers may share. Nothing about them is kept in memory.

A file consists of its description, `<owner>/files/<id>.json`, and its content, `<owner>/files/<id>`. The description
is written before the content is renamed into place, and removed after it. A crash may therefore leave a description
without content, which counts as no file and is removed later.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Literal

import msgspec
from typing_extensions import TypedDict

from mindie_mm.errors import LimitExceeded, NotStored
from mindie_mm.processes import faults
from mindie_mm.processes.writing import sync
from mindie_mm.settings.config import ServiceConfig

_log = logging.getLogger(__name__)

DAY_S = 24 * 3600
BATCH_FILES_S = 30 * DAY_S
"""Time in seconds after which files of batches are removed, as in OpenAI's API."""
_FILE_ID = re.compile(r"file-[0-9a-f]{24}", re.ASCII)
_MOVING_S = 60.0
"""Age in seconds at which a file without its counterpart is no longer being moved, but was left by a dead process."""
OUTPUTS = ("output.jsonl", "errors.jsonl")
"""Names of the files of a batch that become files of the key when the batch ends."""
EVERYONE = "all"
"""Name of the folder that all clients share if the service has no keys."""
_MAX_SHOWN = 80


class FileObject(TypedDict):
    """A file, in OpenAI's format."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file."""

    id: str
    bytes: int
    created: float
    """Unix time. Lists have this order."""
    expires_at: int | None
    """Unix time at which the file is removed, or None."""
    filename: str
    purpose: str

    def described(self) -> FileObject:
        """Return the file in OpenAI's format."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class Used:
    """The space that the files of an API key occupy."""

    files: int
    """Number of files, with the output that each batch in progress may have."""
    num_bytes: int


class FileStore:
    """The files of each API key.

    Only requests with the same key reach a file, so each method takes `owner`, the result of `owner_name` for the key.
    A service without keys has one set of files for all clients. Call methods other than `receiving` in a thread,
    because they access the disk.
    """

    def __init__(self, root: Path, config: ServiceConfig) -> None:
        """Create a store in the folder `root`, which `require_places` has created."""
        self.root = root
        self.uploads = root / "uploads"
        """Spool of the files that are being received."""
        self._has_keys = config.has_keys
        self._max_files = config.max_files_per_key
        self._max_bytes = config.max_file_bytes_per_key
        self.adding = threading.Lock()
        """Lock to hold from a look at the room of a key until the room is used. The event loop must not wait for it."""
        self._coming = Counter[str]()
        """Number of bytes of uploads in progress, by the name of the owner's folder."""

    def owner_name(self, digest: bytes) -> str:
        """Return the name of the folder of the key with this digest."""
        return digest.hex() if self._has_keys else EVERYONE

    @contextmanager
    def receiving(self, owner: str, used: Used) -> Iterator[Callable[[int], None]]:
        """Count the bytes of an upload. Yield the function that counts them, which raises LimitExceeded.

        `used` is the space that the key's files occupied when the upload began. The bytes of other uploads in progress
        are added. Use the context on the event loop only, so that it needs no lock.
        """
        received = 0

        def spend(num_bytes: int) -> None:
            nonlocal received
            self._require_bytes(used.num_bytes + self._coming[owner] + num_bytes)
            received += num_bytes
            self._coming[owner] += num_bytes

        try:
            yield spend
        finally:
            self._coming[owner] -= received

    def require_room(self, owner: str, num_files: int = 1) -> Used:
        """Return the space that the key's files occupy.

        Raise LimitExceeded if the key may not have `num_files` more files.
        """
        self._remove_expired(owner)
        used = self.used(owner)
        if used.files + num_files > self._max_files:
            raise LimitExceeded(
                f"this API key has {used.files} files, with {len(OUTPUTS)} for the output of each batch in progress; "
                f"the limit is {self._max_files} (--max-files-per-key). Delete files that are no longer needed"
            )
        self._require_bytes(used.num_bytes + 1)
        return used

    def room(self, owner: str, num_bytes: int) -> int:
        """Return the number of bytes that may be added to the key's files. Raise LimitExceeded if below `num_bytes`."""
        used = self.used(owner).num_bytes
        self._require_bytes(used + num_bytes)
        return self._max_bytes - used

    def _require_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise LimitExceeded(
                f"the files of this API key would have at least {num_bytes} bytes; the limit is {self._max_bytes} "
                "(--max-file-bytes-per-key). Delete files that are no longer needed"
            )

    def used(self, owner: str) -> Used:
        """Return the space that the key's files and its batches in progress occupy."""
        sizes = []
        with suppress(FileNotFoundError), os.scandir(self._folder(owner)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if _FILE_ID.fullmatch(entry.name):
                        sizes.append(entry.stat().st_size)
        coming = self._of_batches(owner)
        return Used(len(sizes) + coming.files, sum(sizes) + coming.num_bytes)

    def _of_batches(self, owner: str) -> Used:
        """Return the space that batches in progress occupy. A file that also is in the store is not counted again."""
        num_files = num_bytes = 0
        for path in (self.root / owner / "batches").glob("*/*.jsonl"):
            with suppress(FileNotFoundError):
                status = path.stat()
                num_bytes += status.st_size if status.st_nlink == 1 else 0
                num_files += path.name in OUTPUTS
        return Used(num_files, num_bytes)

    def add(
        self,
        owner: str,
        path: Path,
        *,
        filename: str,
        purpose: str,
        expires_after_s: int | None = None,
        limited: bool = True,
    ) -> StoredFile:
        """Move the file at `path` into the store. Raise LimitExceeded if `limited` and the key has no room for it."""
        file_id = f"file-{token_hex(12)}"
        with self.adding:
            if limited:
                self._require_bytes(self.require_room(owner).num_bytes + path.stat().st_size)
            return self.put(owner, file_id, path, filename=filename, purpose=purpose, expires_after_s=expires_after_s)

    def put(
        self, owner: str, file_id: str, path: Path, *, filename: str, purpose: str, expires_after_s: int | None
    ) -> StoredFile:
        """Move the file at `path` into the store under an id. If a crash interrupted the same call, complete it.

        Raises:
            NotStored: The same call was completed earlier, and the file was deleted or has expired since then.

        """
        content = self._folder(owner) / file_id
        content.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = time.time()
        try:
            num_bytes = (path if path.exists() else content).stat().st_size
        except FileNotFoundError:
            raise NotStored(f"the file {filename} was deleted, or has expired") from None
        stored = StoredFile(
            id=file_id,
            bytes=num_bytes,
            created=now,
            expires_at=None if expires_after_s is None else int(now) + expires_after_s,
            filename=filename,
            purpose=purpose,
        )
        with suppress(FileNotFoundError):
            sync(path)
        replace_file(_description(content), msgspec.json.encode(stored))
        if purpose == "batch_output":
            faults.point("batch-described")
        with suppress(FileNotFoundError):
            path.rename(content)
        sync(content.parent)
        return stored

    def get(self, owner: str, file_id: str) -> StoredFile:
        """Return a file. Raise NotStored if the key has no file with this id."""
        stored = _read(self._folder(owner) / f"{file_id}.json") if _FILE_ID.fullmatch(file_id) else None
        if stored is not None and _has_expired(stored):
            self._remove(owner, file_id)
            stored = None
        if stored is None:
            raise NotStored(f"the file {file_id[:_MAX_SHOWN]!r} is not stored, was deleted, or has expired")
        return stored

    def content(self, stored: StoredFile, owner: str) -> Path:
        """Return the path of a file's content."""
        return self._folder(owner) / stored.id

    def delete(self, owner: str, file_id: str) -> None:
        """Remove a file. Raise NotStored if the key has no file with this id."""
        self.get(owner, file_id)
        self._remove(owner, file_id)

    def files(self, owner: str) -> list[StoredFile]:
        """Return the key's files, the oldest first."""
        self._remove_expired(owner)
        return sorted(self._all(owner), key=lambda stored: (stored.created, stored.id))

    def _all(self, owner: str) -> list[StoredFile]:
        found = map(_read, self._folder(owner).glob("file-*.json"))
        return [stored for stored in found if stored is not None]

    def _remove_expired(self, owner: str) -> None:
        for path in self._folder(owner).glob("file-*.json"):
            stored = _read(path)
            is_empty = stored is None and not path.with_suffix("").exists()
            if _is_left_over(path) if is_empty else stored is not None and _has_expired(stored):
                self._remove(owner, path.stem)

    def owners(self) -> list[str]:
        """Return the owners of files."""
        return [folder.parent.name for folder in self.root.glob("*/files")]

    def clean(self, owner: str) -> None:
        """Remove the key's expired files, and files that processes left behind when they were killed."""
        self._remove_expired(owner)
        for pattern in ("files/.file-*.json.*", "batches/*/.batch.json.*"):
            for path in (self.root / owner).glob(pattern):
                if _is_left_over(path):
                    path.unlink(missing_ok=True)

    def _remove(self, owner: str, file_id: str) -> None:
        content = self._folder(owner) / file_id
        content.unlink(missing_ok=True)
        _description(content).unlink(missing_ok=True)

    def _folder(self, owner: str) -> Path:
        return self.root / owner / "files"


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of a small file. Readers see the old or the new content, also after a power failure."""
    new = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        new.write_bytes(content)
        sync(new)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _description(content: Path) -> Path:
    return content.with_name(f"{content.name}.json")


def _read(description: Path) -> StoredFile | None:
    """Return the file with a description, or None if it has no content or the description is damaged."""
    try:
        stored = msgspec.json.decode(description.read_bytes(), type=StoredFile)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _log.error("a file is passed over, because its description %s cannot be read: %s", description, error)
        return None
    return stored if description.with_suffix("").exists() else None


def _is_left_over(path: Path) -> bool:
    """Return whether a file is older than the time that a live process takes to complete it."""
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _MOVING_S
    return False


def _has_expired(stored: StoredFile) -> bool:
    return stored.expires_at is not None and stored.expires_at <= time.time()
