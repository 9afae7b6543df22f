"""Files in object stores, such as s3://, gs:// and hf://: inputs, media, and finished runs. fsspec reads them."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from mindie_mm.batch.input.file_state import FileState
from mindie_mm.errors import CorruptReference, InputError, LimitExceeded, MediaError, StorageError, os_errors_as
from mindie_mm.inputs import Media
from mindie_mm.settings.config import MAX_SOURCE_BYTES
from mindie_mm.settings.paths import absolute, is_url, require_no_broken_url, require_url, shown_url

_BLOCK_BYTES = 4 << 20
"""Number of bytes that one request fetches. s3fs would fetch 50 MiB to read the footer of a table."""
_BUFFER_BYTES = 1 << 20
STORES = {"s3", "s3a", "gs", "gcs", "hf", "az", "abfs", "abfss", "adl", "oss", "oci"}
"""Protocols that rows may name. Their hosts are those that the store's package is configured with."""
_VERSIONS = (
    *("ETag", "generation", "etag", "blob_id", "content_md5", "md5Hash"),
    *("Last-Modified", "LastModified", "last_modified", "mtime", "created"),
)
"""Names that file systems use for what identifies the content of a file. The first of them that a file has is used."""


class Entry(NamedTuple):
    """A file or a folder in a folder of a store."""

    name: str
    is_folder: bool
    version: str
    """Size and, if known, ETag or version of a file."""


@dataclass(frozen=True, order=True, slots=True)
class RemoteFile:
    """A file or a folder in an object store, with the methods of `Path` that reading needs.

    The connection is not part of it. fsspec keeps one per process and thread, so that copies after a fork also work.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """Part of the URL after the last slash."""
        return self.url.rpartition("/")[2]

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file to read it. Raise InputError if its file system is not installed, and OSError if it fails."""
        assert mode == "rb"
        with as_os_errors(self.url):
            system, path = system_of(self.url)
            file = _Reader(system.open(path, "rb", block_size=_BLOCK_BYTES), self.url)
            return io.BufferedReader(file, _BUFFER_BYTES)

    def read_bytes(self) -> bytes:
        """Return the content of the file. `open` lists the errors."""
        with as_os_errors(self.url):
            system, path = system_of(self.url)
            return bytes(system.cat_file(path))

    def size(self) -> int:
        """Return the current size of the file in bytes. `open` lists the errors."""
        with as_os_errors(self.url):
            system, path = system_of(self.url)
            system.invalidate_cache()
            return int(system.size(path))

    def exists(self) -> bool:
        """Return whether there is such a file or folder. `open` lists the errors."""
        with as_os_errors(self.url):
            system, path = system_of(self.url)
            system.invalidate_cache()
            try:
                system.info(path)  # the `exists` of some file systems, such as hf, returns False if the store fails
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def is_folder(self) -> bool:
        """Return whether there is such a folder. `open` lists the errors."""
        with as_os_errors(self.url):
            system, path = system_of(self.url)
            system.invalidate_cache()
            return bool(system.isdir(path))

    def entries(self) -> list[Entry]:
        """Return the files and folders in this folder, sorted by name.

        Raises:
            InputError: There is no such folder, it has an entry without a name, or its file system is not installed.
            OSError: The store fails.

        """
        found = list[Entry]()
        try:
            with as_os_errors(self.url):
                system, path = system_of(self.url)
                system.invalidate_cache()
                infos = system.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(f"there is no folder {self.url}") from None
        for info in infos:
            name = info["name"].rpartition("/")[2]
            is_folder = info["type"] == "directory"
            if info["name"] == path and not is_folder:
                raise InputError(f"{self.url} is a file. Give its URL without a slash at the end")
            if not name and is_folder:
                raise InputError(
                    f"{self.url} has a folder without a name, so that URLs have two slashes there. Rename the objects"
                )
            if name:  # an object without a name stands for the folder itself
                found.append(Entry(name, is_folder, f"{info.get('size')} {_version_of(info)}"))
        return sorted(found)

    def glob(self, pattern: str) -> list[RemoteFile]:
        """Return the files of the folder whose names match. `open` lists the errors."""
        with as_os_errors(self.url):
            system, path = system_of(self.url)
            system.invalidate_cache()
            names = [found.rstrip("/").rpartition("/")[2] for found in system.ls(path, detail=False)]
        return [self / name for name in names if fnmatchcase(name, pattern)]

    def state(self) -> FileState:
        """Return the current state of the file. Raise InputError if nothing identifies its content, or OSError."""
        with as_os_errors(self.url):
            system, path = system_of(self.url)
            system.invalidate_cache()
            info = system.info(path)
        if info.get("type") != "file":
            raise IsADirectoryError(0, f"{self.url} is not a file")
        version = _version_of(info)
        if not version or info.get("size") is None:
            raise InputError(
                f"{self.url} has no ETag and no version, so that a change could not be noticed. Copy it to a local file"
            )
        return FileState(size=int(info["size"]), mtime_ns=0, ctime_ns=0, device=0, inode=0, version=version)


AnyPath = TypeVar("AnyPath", bound=Path | RemoteFile)
"""Path of a local file, or a file in a store."""


def file_at(given: str | os.PathLike[str]) -> Path | RemoteFile:
    """Return the file or the folder with a path or a URL.

    Raises:
        InputError: No file can have this path, or the URL contains a secret.

    """
    if isinstance(given, str) and is_url(given):
        return RemoteFile(require_url("the given file or folder", given))
    require_no_broken_url("the given file or folder", given)
    return absolute(given)


def read_ranges(ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes | OSError]:
    """Fetch ranges [start, stop) of files of one store at the same time, with one request for each.

    The result for a range that cannot be fetched is the error.

    Raises:
        InputError: The file system is not installed.
        OSError: The store cannot be opened.

    """
    if not ranges:
        return []
    url = ranges[0][0].url
    with as_os_errors(url):
        system, _ = system_of(url)
        paths = [system_of(file.url)[1] for file, _, _ in ranges]
        starts, stops = ([one[at] for one in ranges] for at in (1, 2))
        found = system.cat_ranges(paths, starts, stops, on_error="return")
    return [_os_error(one) if isinstance(one, Exception) else bytes(one) for one in found]


@contextmanager
def reading_run(path: Path | RemoteFile) -> Iterator[None]:
    """Turn an OSError from reading a file of a run into CorruptReference, or into StorageError if its store fails."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptReference(f"{path} cannot be read: {os.strerror(errno.ENOENT)}") from error
    except OSError as error:
        kind = StorageError if isinstance(path, RemoteFile) else CorruptReference
        raise kind(f"{path} cannot be read: {error.strerror or error}") from error


def matching(given: str) -> list[str]:
    """Return the URLs that match a URL with `*`, sorted, because shells do not expand URLs. Return others as they are.

    Raises:
        InputError: No file matches, the URL contains a secret, or the store cannot be listed.

    """
    if not is_url(given) or "*" not in given:
        return [given]
    given = require_url("an input", given)
    with os_errors_as(InputError, f"{given} cannot be listed"), as_os_errors(given):
        system, pattern = system_of(given)
        begin = given.removesuffix(pattern)  # has the host, which a path does not have in sftp://host/a
        found = sorted(system.glob(pattern))
        urls = [f"{begin}{path}" for path in found] if begin != given else [*map(system.unstrip_protocol, found)]
    if not urls:
        raise InputError(f"no file matches {given}")
    return urls


def fetched(media: Media) -> Media:
    """Return `media` with bytes in place of URLs of object stores. http and https are left to the other steps.

    Raises:
        MediaError: A file cannot be read.
        LimitExceeded: A file is too large.

    """
    source = media.source
    if isinstance(source, tuple):
        return msgspec.structs.replace(media, source=tuple(map(_content, source)))
    return msgspec.structs.replace(media, source=_content(source)) if isinstance(source, str) else media


def _content(source: Any) -> Any:
    if not isinstance(source, str) or not is_url(source) or source.lower().startswith(("http:", "https:")):
        return source
    if refusal := refusal_of(source):
        raise MediaError(refusal)
    file = RemoteFile(source)
    try:
        (data,) = read_ranges([(file, 0, MAX_SOURCE_BYTES + 1)])  # one request, without a request for the size
        if isinstance(data, OSError):
            if file.size():  # stores refuse every range of an empty file
                raise data
            data = b""
    except FileNotFoundError:
        raise MediaError(f"there is no file {source}") from None
    except OSError as error:
        raise MediaError(f"{source} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_SOURCE_BYTES:
        raise LimitExceeded(f"{source} has more bytes than the limit of {MAX_SOURCE_BYTES}")
    return data


def refusal_of(url: str) -> str:
    """Return the reason why rows cannot have media at a URL. Return an empty string if they can."""
    if "::" in url:  # fsspec would read the URL after it, also one of a host that is not public
        return f"{shown_url(url)} is a chain of URLs, which rows cannot have as media"
    if url.partition(":")[0].lower() not in STORES:  # such as webhdfs and ftp, whose hosts may not be public
        return f"{shown_url(url)} is not in an object store; media of rows may be in {', '.join(sorted(STORES))}"
    return ""


def _version_of(info: Mapping[str, Any]) -> str:
    return next((str(info[name]) for name in _VERSIONS if info.get(name)), "")


class _Reader(io.RawIOBase):
    """A file of fsspec whose errors are all OSErrors."""

    def __init__(self, file: Any, url: str) -> None:
        self._file = file
        self._url = url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        with as_os_errors(self._url):
            data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with as_os_errors(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def system_of(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there. fsspec caches one per thread. It raises several errors."""
    from fsspec.core import url_to_fs  # imported late, because most inputs are local

    scheme, mark, rest = url.partition("://")
    system, path = url_to_fs(f"{scheme.lower()}{mark}{rest}")
    return system, path


@contextmanager
def as_os_errors(url: str) -> Iterator[None]:
    """Turn errors of libraries for object stores, which have no common class, into OSErrors."""
    try:
        yield
    except (OSError, InputError):
        raise
    except ImportError as error:
        raise InputError(f"{url} cannot be read: {error}") from error
    except Exception as error:
        raise _os_error(error) from error


def _os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(0, f"{type(error).__name__}: {error}")
