"""Fetches the media of requests from HTTP, data: URLs, base64 and files, and writes them to the spool.

Tokenizer processes read only these files. Only this module resolves the sources that clients send.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Self

from mindie_mm.errors import InputError, LimitExceeded, MediaError, OperationalError, naming, os_errors_as
from mindie_mm.inputs import EMBEDDINGS_KEYS, KINDS, MAX_LISTED_FRAMES, PROMPT, Media, Paths
from mindie_mm.media.fetch.http import fetch
from mindie_mm.media.fetch.threads import Threads
from mindie_mm.media.fetch.urls import base64_size, base64_start, decode_base64, file_url_path, scheme_of
from mindie_mm.processes.tasks import gather, off_loop
from mindie_mm.settings.config import ServiceConfig
from service.request.file_types import HEAD_BYTES, extension, is_base64_media
from service.request.quota import NO_FILES, ItemQuota, MediaQuota

_MAX_PATH = 4096
_KERNELS = ("/proc", "/sys")
"""Kernel file systems. Their files contain no media, report no size, and may have no end."""
_PIECE_BYTES = 1 << 20


class SpooledFile(str):
    """Path of a file that this service has written to the spool for the same request.

    Only the service creates objects of this class, because JSON contains plain strings. The file is used where it is.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Request:
    """The request whose media are spooled."""

    name: str
    """Unique name of the request."""
    files: list[Path]
    """Files that were written for the request."""
    spend: Callable[[int], None]
    """Function that counts bytes before they are written, or while they are fetched. The function raises LimitExceeded
    or SpoolFull."""
    turns: asyncio.Semaphore
    """Limit on the number of files that the request spools at a time. Without it, a request with many files or slow
    servers would hold up other requests."""

    def new_file(self, stem: Path, head: bytes) -> Path:
        """Return the path of a new file, whose extension is that of media that begin with `head`."""
        path = stem.with_name(f"{stem.name}.{extension(head) or 'bin'}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self.files.append(path)
        return path

    def write(self, data: bytes, stem: Path) -> Path:
        """Write a new file, and return its path."""
        path = self.new_file(stem, data[:HEAD_BYTES])
        path.write_bytes(data)
        return path


class _Copy:
    """A file that a thread copies for a request. Nothing is written after the context has been left.

    The thread may outlive the request, because a read cannot be canceled while the file system does not respond.
    """

    def __init__(self, stem: Path, request: _Request) -> None:
        self._stem = stem
        self._request = request
        self._lock = threading.Lock()
        self._is_over = False
        self._spent = self._written = 0
        self.path: Path | None = None
        """Path of the file, or None before the first write."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # waits for one piece at most
            self._is_over = True

    def write(self, piece: bytes, size: int) -> None:
        """Append the next bytes of a source file that had `size` bytes when it was opened.

        The bytes are counted before they are written. The copy is open only during a write, so that its space is free
        as soon as it is removed.

        Raises:
            ValueError: The context has been left.

        """
        with self._lock:
            if self._is_over:
                raise ValueError("the request has ended")
            self._written += len(piece)
            if (more := max(size, self._written) - self._spent) > 0:
                self._request.spend(more)
                self._spent += more
            if self.path is None:
                self.path = self._request.new_file(self._stem, piece[:HEAD_BYTES])
            with self.path.open("ab") as file:
                file.write(piece)


class MediaPolicy:
    """The service's rules for media: permitted sources, and limits on count and size. `spool` enforces the rules."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self._fetching = asyncio.Semaphore(config.max_concurrent_fetches)
        self._reading = Threads("media-file")
        self._quota = MediaQuota(config.max_media_bytes, config.max_spool_bytes)
        self._files: dict[str, list[Path]] = {}
        """Files that were written for each request."""

    def check(self, items: Sequence[Media]) -> None:
        """Raise InputError if a request must not have these items, whatever their content."""
        if len(items) > self.config.max_media_items:
            raise LimitExceeded(f"the request has {len(items)} media items; the limit is {self.config.max_media_items}")
        config = self.config
        if not config.enable_mm_embeds and any(item.is_embeddings and item.kind != PROMPT for item in items):
            raise InputError(
                f"{', '.join(EMBEDDINGS_KEYS[kind] for kind in KINDS)} are not accepted by this service; start the "
                "service with --enable-mm-embeds, or send the image, video or audio clip itself"
            )
        if not config.enable_prompt_embeds and any(item.kind == PROMPT for item in items):
            raise InputError(
                f"{EMBEDDINGS_KEYS[PROMPT]} are not accepted by this service; start it with --enable-prompt-embeds, or "
                "send text"
            )
        num_frames = sum(item.num_listed_frames for item in items)
        if num_frames > MAX_LISTED_FRAMES:
            raise LimitExceeded(f"the request has {num_frames} frames in lists; the limit is {MAX_LISTED_FRAMES}")

    async def spool(self, items: Sequence[Media], folder: Path, prefix: str = "") -> list[Paths]:
        """Write `items` to files in `folder`. The files count toward the limits of the spool until `remove`.

        The file of an item is <kind>/<n>.<ext>, where n counts the items of its kind from 1. If a video is given as
        frames, each frame is a file <kind>/<n>-<k>.<ext>. In a folder that requests share, files are not in folders for
        each kind, and their names begin with <prefix><kind>-. An item's size limit applies to all of its files
        together. `folder` and `prefix` identify the request.

        Returns:
            The files in the order of the items.

        Raises:
            InputError: An item cannot be read, or the request exceeds a limit.
            SpoolFull: The spool is full.

        """
        self.check(items)
        config = self.config
        turns = asyncio.Semaphore(-(-config.max_concurrent_fetches // 4))
        name = _name(folder, prefix)
        request = _Request(name, self._files.setdefault(name, []), partial(self._quota.spend, name), turns)
        counts: dict[str, int] = {}
        writes = []
        for index, item in enumerate(items):
            number = counts[item.kind] = counts.get(item.kind, 0) + 1
            stem = folder / (f"{prefix}{item.kind}-{number}" if prefix else f"{item.kind}/{number}")
            writes.append(self._spool_item(f"media item {index} ({item.kind})", item, stem, request))
        return await gather(writes)

    def spend(self, folder: Path, num_bytes: int) -> None:
        """Count bytes in a request's folder that are not written by `spool`, until `remove`.

        A negative number takes bytes off the count. Raise LimitExceeded or SpoolFull at a limit.
        """
        self._quota.spend(_name(folder), num_bytes)

    def remove(self, folder: Path, prefix: str = "") -> None:
        """Delete the files that `spool` wrote for a request. Call this method only when no file is being written."""
        name = _name(folder, prefix)
        files = self._files.pop(name, [])
        for file in files:
            with suppress(OSError):
                file.unlink()
        for kind in {file.parent for file in files} - {folder}:
            with suppress(OSError):
                kind.rmdir()
        self._quota.free(name)

    async def _spool_item(self, what: str, item: Media, stem: Path, request: _Request) -> Paths:
        """Spool one item. Error messages call the item `what`."""
        request = replace(request, spend=ItemQuota(self.config.max_item_bytes, request.spend).spend)
        if not isinstance(item.source, tuple):
            return await self._spool_file(what, item.source, stem, request)
        writes = []
        for index, part in enumerate(item.source):
            part_stem = stem.with_name(f"{stem.name}-{index + 1}")
            writes.append(self._spool_file(f"{what}: {item.part_name(index)}", part, part_stem, request))
        return await gather(writes)

    async def _spool_file(self, what: str, source: Any, stem: Path, request: _Request) -> Path:
        async with request.turns:
            return await self._bring(what, source, stem, request)

    async def _bring(self, what: str, source: Any, stem: Path, request: _Request) -> Path:
        if isinstance(source, SpooledFile):
            return Path(source)
        with naming(what):
            if isinstance(source, bytes):  # kept from an earlier request
                request.spend(len(source))
                return await off_loop(len(source), lambda: request.write(source, stem))
            _require_unicode(source)
            scheme = scheme_of(source)
            if scheme in ("http", "https"):
                data = await self._fetch(source, request)
                return await off_loop(len(data), lambda: request.write(data, stem))
            # Base64 of a JPEG also starts with a slash.
            if scheme == "file" or (source.startswith("/") and not is_base64_media(source)):
                path = file_url_path(source) if scheme else source
                with _Copy(stem, request) as copy:
                    await self._reading.run(lambda: self._read(path, copy), request.name)
                assert copy.path is not None
                return copy.path
            if scheme not in ("", "data"):
                raise MediaError(f"the URL has the scheme {scheme[:16]!r}; it must be http, https, data or file")
            start = base64_start(source) if scheme else 0
            request.spend(size := base64_size(source, start))
            return await off_loop(len(source) + size, lambda: request.write(decode_base64(source, start), stem))

    async def _fetch(self, url: str, request: _Request) -> bytes:
        async with self._fetching:
            return await fetch(
                url,
                max_bytes=self.config.max_item_bytes,
                timeout_s=self.config.fetch_timeout_s,
                connect_timeout_s=self.config.fetch_connect_timeout_s,
                read_timeout_s=self.config.fetch_read_timeout_s,
                max_redirects=self.config.max_fetch_redirects,
                allowed_domains=self.config.allowed_media_domains,
                allow_private=self.config.allow_private_media,
                spend=request.spend,
                request=request.name,
            )

    def _read(self, path: str, copy: _Copy) -> None:
        """Copy a file under the allowed folder.

        The path of the opened file is checked too, because a symbolic link may change before the file is opened.
        """
        folder = self.config.allowed_media_dir
        if folder is None:
            raise MediaError("this service does not read files, because --allowed-media-dir is not set")
        if len(path) > _MAX_PATH or "\0" in path:
            raise MediaError(f"the path has a NUL character or more than {_MAX_PATH} characters")
        refused = MediaError("there is no such file in the allowed media folder")
        if not Path(path).is_absolute() or not _is_under(os.path.realpath(path), folder):
            raise refused
        try:
            opened = FileIO(path, "rb", opener=_open_nonblocking)
        except OSError as error:
            if error.errno in NO_FILES:
                raise
            raise refused from error
        with opened as file:
            status = os.fstat(file.fileno())
            opened_path = str(Path(f"/proc/self/fd/{file.fileno()}").readlink())
            if not _is_under(opened_path, folder) or any(_is_under(opened_path, Path(kernel)) for kernel in _KERNELS):
                raise refused
            if not stat.S_ISREG(status.st_mode):
                raise MediaError("the path is not a regular file")
            copy.write(_piece_of(file), status.st_size)
            while piece := _piece_of(file):  # up to the end, because the file may have grown
                copy.write(piece, status.st_size)


def _piece_of(file: FileIO) -> bytes:
    """Read the next bytes of a file. Raise OperationalError if the file system fails."""
    with os_errors_as(OperationalError, "the file cannot be read"):
        return file.read(_PIECE_BYTES)


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file. If it is a named pipe, do not wait for its other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def _require_unicode(source: str) -> None:
    """Raise MediaError if the source contains lone surrogates, which URL parsers ignore."""
    try:
        if not source.isascii():  # avoids a copy of long base64
            source.encode()
    except UnicodeEncodeError as error:
        raise MediaError(f"the source contains a lone surrogate at character {error.start}") from None


def _name(folder: Path, prefix: str = "") -> str:
    """Return the name of the request whose files in `folder` begin with `prefix`."""
    return f"{folder.name}/{prefix}"


def _is_under(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(folder.resolve())
