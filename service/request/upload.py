"""Receives a form with a file (multipart/form-data). The file is written to disk while it arrives."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from secrets import token_hex

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException

from mindie_mm.errors import InputError, RequestAborted, SpoolFull
from mindie_mm.processes import faults
from mindie_mm.processes.tasks import in_thread

_log = logging.getLogger(__name__)

UPLOADING = ".upload-"
"""Beginning of the names of files that are being received."""
MAX_FIELDS = 64
"""Maximum number of fields of a form besides its file."""
MAX_FIELD_BYTES = 2**18
"""Maximum size of all fields together."""
_MAX_FRAME_BYTES = 2**18
"""Upper limit of the bytes in headers and boundaries of a form with at most `MAX_FIELDS` fields."""
_MAX_NAME = 255
_PIECE_BYTES = 2**18
"""Number of bytes to parse at a time, and to hold before they are written."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A form that has been received, with the content of its file on disk."""

    path: Path
    """The file. It is removed when the context of `receive_upload` is left, unless it has been renamed."""
    filename: str
    """Name that the client gave the file, without folders and without control characters. It may be empty."""
    content_type: str
    """Media type that the client gave the file, in lower case and without parameters. It may be empty."""
    num_bytes: int
    fields: Mapping[str, list[str]]
    """Values of the other fields by name, in the order in which they were sent."""

    def field(self, name: str) -> str | None:
        """Return the value of a field, or None without one. Raise InputError if there are several values."""
        values = self.fields.get(name, [])
        if len(values) > 1:
            raise InputError(f"the form has {len(values)} fields {name}; send one", param=name)
        return values[0] if values else None


@asynccontextmanager
async def receive_upload(
    request: Request, folder: Path, max_bytes: int, *, setting: str, spend: Callable[[int], object] | None = None
) -> AsyncIterator[Upload]:
    """Receive the form of a request, and write its field `file` to a new file in `folder`.

    No JSON body may be declared for the route, because the body must not have been read. The file is removed on every
    exit. A dependency of a route may yield the upload, because the rest of a dependency runs after the response.

    Args:
        request: The request.
        folder: An existing folder.
        max_bytes: Maximum size of the file.
        setting: Option that sets `max_bytes`, for error messages.
        spend: Function that counts bytes before they are written. It may raise an error.

    Raises:
        HTTPException: The body is not a form (status 415), the file or the form is too long (413), or arrives too
            slowly (408).
        InputError: The form is not valid, or does not have one file.
        SpoolFull: The file cannot be written.
        RequestAborted: The client closed the connection.

    """
    boundary = _boundary(request)
    request.state.spool_body(max_bytes + MAX_FIELD_BYTES + _MAX_FRAME_BYTES)
    path = folder / f"{UPLOADING}{token_hex(16)}"
    try:
        form = _Form(boundary, max_bytes, setting)
        with _opened(path) as file:
            await _receive(request, form, file, spend)
        request.state.form = form.fields  # the access log must not show values of the client
        yield form.upload(path)
    finally:
        path.unlink(missing_ok=True)


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind.lower() != b"multipart/form-data":
        raise HTTPException(415, "the body must be a form with a file: multipart/form-data")
    if not boundary:
        raise InputError("Content-Type has no boundary; let the HTTP client set this header")
    return boundary


def _opened(path: Path) -> FileIO:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_written(error) from error
    return FileIO(descriptor, "wb")


async def _receive(request: Request, form: _Form, file: FileIO, spend: Callable[[int], object] | None) -> None:
    """Parse the body, and write the file's bytes. At most two pieces are in memory at a time."""

    async def write() -> None:
        data = form.take()
        if spend is not None:
            spend(len(data))
        try:
            await in_thread(lambda: _write_all(file, data))
        except OSError as error:
            raise _not_written(error) from error

    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestAborted("the client closed the connection")
        body, more = memoryview(message.get("body", b"")), message.get("more_body", False)
        for start in range(0, len(body), _PIECE_BYTES):
            form.add(bytes(body[start : start + _PIECE_BYTES]))
            if form.num_waiting >= _PIECE_BYTES:
                await write()
    form.end()
    if form.num_waiting:
        await write()
    faults.point("uploading")


def _write_all(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _not_written(error: OSError) -> SpoolFull:
    _log.warning("an upload cannot be written: %s", error)
    return SpoolFull(f"the service cannot store the upload: {error.strerror or 'see the log of the service'}")


class _Form:
    """Parser of a form, with limits on all of its parts."""

    def __init__(self, boundary: bytes, max_bytes: int, setting: str) -> None:
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_name,
                    "on_header_value": self._add_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_data,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InputError(f"the form is not valid: {error}") from error
        self._max_bytes = max_bytes
        self._setting = setting
        self.fields: dict[str, list[str]] = {}
        self._num_fields = self._num_field_bytes = 0
        self._file: tuple[str, str, int] | None = None
        """Name, type and size of the file."""
        self._is_complete = False
        self._waiting = bytearray()
        self._begin_part()

    @property
    def num_waiting(self) -> int:
        """Number of bytes of the file that have not been taken."""
        return len(self._waiting)

    def take(self) -> bytes:
        """Return the bytes of the file that have not been taken yet."""
        data = bytes(self._waiting)
        self._waiting.clear()
        return data

    def add(self, data: bytes) -> None:
        """Parse the next bytes of the body. Raise InputError or HTTPException if they are refused."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InputError(f"the form is not valid: {error}") from error

    def end(self) -> None:
        """Raise InputError unless the form is complete and has a file."""
        if not self._is_complete:
            raise InputError("the form is not complete: the boundary at its end is missing")
        if self._file is None:
            raise InputError("the form has no field file", param="file")

    def upload(self, path: Path) -> Upload:
        assert self._file is not None
        name, content_type, num_bytes = self._file
        return Upload(path, name, content_type, num_bytes, self.fields)

    def _begin_part(self) -> None:
        self._headers: dict[str, bytes] = {}
        self._header, self._value, self._data = bytearray(), bytearray(), bytearray()
        self._name = ""
        self._is_file = False

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.decode("latin-1").lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _begin_data(self) -> None:
        kind, options = parse_options_header(self._headers.get("content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise InputError("a part of the form has no header Content-Disposition: form-data with a name")
        self._name = _text(options[b"name"], "the name of a field")
        self._is_file = self._name == "file"
        if not self._is_file:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise HTTPException(413, f"the form has more than {MAX_FIELDS} fields, which is the limit")
            return
        if self._file is not None:
            raise InputError("the form has several fields named file; send one file in a request", param="file")
        content_type, _ = parse_options_header(self._headers.get("content-type", b""))
        self._file = _file_name(options.get(b"filename", b"")), content_type.decode("latin-1")[:_MAX_NAME], 0

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            assert self._file is not None
            name, content_type, num_bytes = self._file
            self._file = name, content_type, num_bytes + end - start
            if self._file[2] > self._max_bytes:
                raise HTTPException(
                    413,
                    f"the file has at least {self._file[2]} bytes; the limit is {self._max_bytes} ({self._setting})",
                )
            self._waiting += memoryview(data)[start:end]
            return
        self._num_field_bytes += end - start
        if self._num_field_bytes > MAX_FIELD_BYTES:
            raise HTTPException(
                413, f"the form's fields besides the file have more than {MAX_FIELD_BYTES} bytes, which is the limit"
            )
        self._data += data[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields.setdefault(self._name, []).append(_text(bytes(self._data), f"the field {self._name[:40]!r}"))

    def _end(self) -> None:
        self._is_complete = True


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8") from error


def _file_name(data: bytes) -> str:
    """Return the last part of a path, without control characters."""
    name = "".join(letter for letter in data.decode("utf-8", "replace") if letter.isprintable())
    name = re.split(r"[/\\]", name)[-1][:_MAX_NAME]
    return "" if name in {".", ".."} else name
