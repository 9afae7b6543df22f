"""A request's media, brought into its directory as files: from data: URLs, base64, HTTP and files.

The tokenizers read files and nothing else: what a client names is resolved, fetched and bounded here.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import pybase64

from mindie_mm.config import ServiceConfig
from mindie_mm.errors import InputError, LimitExceeded, MediaError, SharedMemoryError, SpoolFull
from mindie_mm.inputs import KINDS, Item, Media, Message, Text
from mindie_mm.media.fetch import fetch
from mindie_mm.media.file_url import file_url_path

T = TypeVar("T")

_log = logging.getLogger(__name__)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,63}):")  # base64 that goes on without end is not searched for more
_MAX_DATA_HEAD = 256
"""Characters of a data: URL in front of its data."""
_MAX_PATH = 4096
_KERNELS = ("/proc", "/sys")
"""Files that hold no media, have no size, and may have no end."""
_PIECE_BYTES = 1 << 20
_SNIFFED_BYTES = 48
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})

# Format by content: (offset, magic, extension). What a name or a content type claims is not asked.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"GIF8", "gif"),
    (8, b"WEBP", "webp"),
    (0, b"BM", "bmp"),
    (0, b"II*\x00", "tiff"),
    (0, b"MM\x00*", "tiff"),
    (4, b"ftypavif", "avif"),
    (4, b"ftypM4A", "m4a"),
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "mkv"),
    (8, b"AVI ", "avi"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "wmv"),
    (8, b"WAVE", "wav"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
    (0, b"\xff\xfa", "mp3"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
    (8, b"AIFF", "aiff"),
    (8, b"AIFC", "aiff"),
)


class MediaPolicy:
    """Where media may come from, and how much of it."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self._fetching = asyncio.Semaphore(config.max_concurrent_fetches)
        self._spool = _Spool(config.max_spool_bytes)

    async def spool(self, items: Sequence[Media], directory: Path) -> list[Path]:
        """Writes `items` under `directory` as <kind>/<n>.<ext>, n from 1 in order; the files, in the same order.

        They are there, and count for the service's spool, until `remove`. Raises InputError and below, naming the item;
        SpoolFull.
        """
        if len(items) > self.config.max_media_items:
            raise LimitExceeded(f"{len(items)} media items, the limit is {self.config.max_media_items}")
        config = self.config
        limits = {"image": config.max_images, "video": config.max_videos, "audio": config.max_audios}
        for kind, limit in limits.items():
            if (count := sum(item.kind == kind for item in items)) > limit:
                raise LimitExceeded(f"{count} media items of kind {kind}, the limit is {limit}")
        # A request whose servers are slow leaves the others their turns.
        fetching = asyncio.Semaphore(-(-config.max_concurrent_fetches // 4))
        budget = _Budget(directory.name, config.max_media_bytes, fetching, self._spool)
        counts: dict[str, int] = {}
        writes = []
        for index, item in enumerate(items):
            number = counts[item.kind] = counts.get(item.kind, 0) + 1
            writes.append(self._spool_one(index, item, directory / item.kind / str(number), budget))
        return await gather(writes)

    def remove(self, directory: Path) -> None:
        """Deletes a request's media files, once none is being written; its path file stays."""
        for kind in KINDS:
            shutil.rmtree(directory / kind, ignore_errors=True)
        self._spool.give_back(directory.name)

    async def _spool_one(self, index: int, item: Media, stem: Path, budget: _Budget) -> Path:
        try:
            source = item.source
            assert isinstance(source, str), "JSON has no bytes"
            _require_unicode(source)
            if (path := self._local_path(source)) is not None:
                return await _in_thread(lambda: self._copy(path, stem, budget))
            if source[:5].lower() == "http:" or source[:6].lower() == "https:":
                data = await self._fetch(source, budget)
                return await _in_thread(lambda: _write(data, stem))
            start = _base64_start(source)
            num_bytes = (len(source) - start) // 4 * 3 - source.count("=", max(start, len(source) - 2))
            self._check_size(num_bytes)
            budget.spend(num_bytes)
            return await _in_thread(lambda: _write(_decoded(source, start), stem))
        except InputError as error:
            raise type(error)(f"media item {index} ({item.kind}): {error}") from error

    async def _fetch(self, url: str, budget: _Budget) -> bytes:
        async with budget.fetching, self._fetching:
            return await fetch(
                url,
                max_bytes=self.config.max_item_bytes,
                timeout_s=self.config.fetch_timeout_s,
                connect_timeout_s=self.config.fetch_connect_timeout_s,
                read_timeout_s=self.config.fetch_read_timeout_s,
                max_redirects=self.config.max_fetch_redirects,
                allowed_domains=self.config.allowed_media_domains,
                allow_private=self.config.allow_private_media,
                spend=budget.spend,
                request=budget.request,
            )

    def _local_path(self, source: str) -> str | None:
        """The path that `source` names as a file: URL or by itself; None if it is something else.

        Base64 of a JPEG starts with a slash: what decodes to media is no path.
        """
        if source[:5].lower() == "file:":
            return file_url_path(source)
        return source if source.startswith("/") and not _is_base64_media(source) else None

    def _copy(self, path: str, stem: Path, budget: _Budget) -> Path:
        """Copies a file under the allowed folder; what is checked is the file that was opened."""
        folder = self.config.allowed_media_dir
        if folder is None:
            raise MediaError("files are not read by this service (--allowed-media-dir)")
        if len(path) > _MAX_PATH or "\0" in path:
            raise MediaError(f"not a path of at most {_MAX_PATH} characters")
        refused = MediaError("no such file under the allowed media folder")
        if not Path(path).is_absolute() or not _is_under(os.path.realpath(path), folder):
            raise refused
        try:
            opened = FileIO(path, "rb", opener=_open_nonblocking)
        except OSError as error:
            if error.errno in _NO_FILES:
                raise
            raise refused from error
        with opened as file:
            status = os.fstat(file.fileno())
            opened_path = str(Path(f"/proc/self/fd/{file.fileno()}").readlink())
            if not _is_under(opened_path, folder) or any(_is_under(opened_path, Path(kernel)) for kernel in _KERNELS):
                raise refused
            if not stat.S_ISREG(status.st_mode):
                raise MediaError("not a regular file")
            self._check_size(status.st_size)
            budget.spend(status.st_size)
            target = _target(stem, file.read(_SNIFFED_BYTES))
            file.seek(0)
            copied = 0
            with target.open("wb") as copy:
                while piece := file.read(_PIECE_BYTES):
                    copied += len(piece)
                    self._check_size(copied)  # it may grow while it is read
                    copy.write(piece)
            budget.spend(max(0, copied - status.st_size))
        return target

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.config.max_item_bytes:
            raise LimitExceeded(f"{num_bytes} bytes, the limit for one item is {self.config.max_item_bytes}")


class _Spool:
    """What all requests' media take."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: dict[str, int] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()  # files are copied on threads

    def spend(self, request: str, num_bytes: int) -> None:
        """SpoolFull where they would take more than the limit."""
        with self._lock:
            if (whole := self._num_bytes + num_bytes) > self._limit:
                raise SpoolFull(f"the media of all requests take {whole} bytes, the limit is {self._limit}")
            self._num_bytes = whole
            self._requests[request] = self._requests.get(request, 0) + num_bytes

    def give_back(self, request: str) -> None:
        """What it has spent, if anything."""
        with self._lock:
            self._num_bytes -= self._requests.pop(request, 0)


@dataclass(slots=True)
class _Budget:
    """What a request's media may take."""

    request: str
    """The name of its directory, which no other has."""
    limit: int
    """Bytes."""
    fetching: asyncio.Semaphore
    """Of it, at a time."""
    spool: _Spool
    spent: int = 0

    def spend(self, num_bytes: int) -> None:
        self.spent += num_bytes
        if self.spent > self.limit:
            raise LimitExceeded(f"the request's media take {self.spent} bytes, the limit is {self.limit}")
        self.spool.spend(self.request, num_bytes)


def with_paths(items: Sequence[Item], paths: Iterator[Path]) -> list[dict[str, Any]]:
    """`items` as a `List[Dict]`; each medium takes the next of `paths`."""
    return [_as_dict(item, paths) for item in items]


def messages_with_paths(messages: Sequence[Message], paths: Iterator[Path]) -> list[dict[str, Any]]:
    """`messages` as dicts; each medium takes the next of `paths`."""
    return [
        {
            **message.extra,
            "role": message.role,
            "content": with_paths(message.content, paths) if isinstance(message.content, tuple) else message.content,
        }
        for message in messages
    ]


@contextmanager
def room_to_spool() -> Iterator[None]:
    """SpoolFull in the place of an error by which the system has no more room, or no more files."""
    try:
        yield
    except (OSError, SharedMemoryError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _NO_ROOM | _NO_FILES:
            raise
        _log.warning("the spool takes no more: %s", cause.strerror)
        raise SpoolFull(f"the spool takes no more: {cause.strerror}") from error


async def gather(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Their results, in order; the first failure ends the others before it is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _in_thread(work: Callable[[], T]) -> T:
    """`work()` in a thread; when cancelled, waits for it, so that nothing writes into a directory being removed."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _as_dict(item: Item, paths: Iterator[Path]) -> dict[str, Any]:
    if isinstance(item, Text):
        return {"text": item.text}
    options = {f.name: getattr(item.options, f.name) for f in fields(item.options)}
    return {item.kind: str(next(paths)), **{name: value for name, value in options.items() if value is not None}}


def _open_nonblocking(path: str, flags: int) -> int:
    """Opening a pipe waits for its other end otherwise."""
    return os.open(path, flags | os.O_NONBLOCK)


def _require_unicode(source: str) -> None:
    """URL parsers pass over lone surrogates."""
    try:
        if not source.isascii():  # base64 is, however long
            source.encode()
    except UnicodeEncodeError as error:
        raise MediaError(f"the source holds a lone surrogate at character {error.start}") from None


def _base64_start(source: str) -> int:
    """Where the base64 of a data: URL begins; 0 for bare base64."""
    if source[:5].lower() == "data:":
        stop = source.find(",", 0, _MAX_DATA_HEAD)
        if not source[: max(0, stop)].lower().endswith(";base64"):
            raise MediaError("a data: URL that is not of the form data:<type>;base64,<data>")
        return stop + 1
    if (scheme := _SCHEME.match(source)) is not None:
        raise MediaError(f"a URL of scheme {scheme[1][:16]!r}; http, https, data and file are read")
    return 0


def _decoded(source: str, start: int) -> bytes:
    """The bytes of `source`'s base64, which begins at `start`."""
    try:
        return pybase64.b64decode(source[start:], validate=True)
    except ValueError as error:
        if start:
            raise MediaError("a data: URL whose base64 is not valid: white space, or padding (=) left out?") from error
        raise MediaError("neither a path, a URL nor valid base64") from error


def _write(data: bytes, stem: Path) -> Path:
    target = _target(stem, data[:_SNIFFED_BYTES])
    target.write_bytes(data)
    return target


def _target(stem: Path, head: bytes) -> Path:
    stem.parent.mkdir(mode=0o700, exist_ok=True)
    return stem.with_name(f"{stem.name}.{_extension(head) or 'bin'}")


def _extension(head: bytes) -> str | None:
    return next((ext for offset, magic, ext in _MAGIC if head.startswith(magic, offset)), None)


def _is_base64_media(text: str) -> bool:
    head = text[: _SNIFFED_BYTES // 3 * 4]
    try:
        return len(text) % 4 == 0 and _extension(pybase64.b64decode(head, validate=True)) is not None
    except ValueError:
        return False


def _is_under(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(folder.resolve())
