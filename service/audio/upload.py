"""Reads a multipart body while it arrives, and writes its file to the spool piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from mindie_mm.errors import InputError, LimitExceeded, RequestAborted
from mindie_mm.processes.tasks import in_thread
from service.request.prompts import spool_directory
from service.request.quota import ItemQuota, room_to_spool
from service.request.state import Service

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_PARTS = 128
_MAX_VALUE_BYTES = 2**18
"""Maximum number of bytes of all values together, except the file."""
_PIECE_BYTES = 2**18
"""Number of bytes that are written at a time."""
_FILE = "file"
_FORM = b"multipart/form-data"


@dataclass(slots=True)
class Upload:
    """The fields of a multipart body, and the file that it brought."""

    directory: Path
    """Request directory, which exists as long as the request."""
    fields: dict[str, list[str]] = field(default_factory=dict)
    """Values by name, in order. The brackets at the end of a name such as `include[]` are left out."""
    num_bytes: int = -1
    """Size of the file, or -1 if the body has none."""

    @property
    def folder(self) -> Path:
        """Folder for the file and for the clips that are made of it."""
        return self.directory / "audio"

    @property
    def file(self) -> Path:
        """The file. Its name does not depend on the name that the client sent."""
        return self.folder / "upload"


@asynccontextmanager
async def uploaded(request: Request, service: Service) -> AsyncIterator[Upload]:
    """Yield the upload of a request, and remove it at exit.

    The middleware limits the time of the body and its size. The file counts toward the limits of the spool.

    Raises:
        InputError: The body is not a valid form, or has no file.
        LimitExceeded: The file, the fields or their number exceed a limit.
        SpoolFull: The spool is full.
        RequestAborted: The client is gone.
        HTTPException: The content type is not that of a form (status 415), or the middleware refuses the body.

    """
    kind, parameters = parse_options_header(request.headers.get("content-type"))
    if kind.lower() != _FORM:
        shown = kind.decode("latin-1")[:40] or "no type"
        raise HTTPException(415, f"the body must be multipart/form-data with a part named file, not {shown}")
    if not (boundary := parameters.get(b"boundary")):
        raise InputError("the header Content-Type has no boundary; let the HTTP client set this header")
    with room_to_spool(), spool_directory(service.spool) as directory:
        try:
            upload = Upload(directory.path)
            request.state.form = upload.fields  # for the log, which must not contain the client's text
            upload.folder.mkdir(mode=0o700)
            spend = partial(service.media.spend, directory.path)
            quota = ItemQuota(service.config.max_item_bytes, spend)
            await _Reader(boundary, upload, quota).read(request)
            if upload.num_bytes < 1:
                fault = "has no part named file" if upload.num_bytes else "has an empty file"
                raise InputError(f"the form {fault}", param=_FILE)
            yield upload
        finally:
            service.media.remove(directory.path)


class _Reader:
    """Callbacks of the parser. They only collect: the parser cannot wait for a write."""

    def __init__(self, boundary: bytes, upload: Upload, quota: ItemQuota) -> None:
        self._upload = upload
        self._quota = quota
        self._name = ""
        self._header = self._header_value = b""
        self._num_parts = self._num_value_bytes = 0
        self._value = bytearray()
        self._piece = bytearray()
        self._is_complete = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise InputError(f"the boundary of the form is not valid: {error}") from error

    async def read(self, request: Request) -> None:
        try:
            async for chunk in request.stream():
                try:
                    self._parser.write(chunk)
                except FormParserError as error:
                    raise InputError(f"the body is not a valid form: {error}") from error
                if len(self._piece) >= _PIECE_BYTES:
                    await self._write()
        except ClientDisconnect as error:
            raise RequestAborted("the client closed the connection") from error
        if not self._is_complete:
            raise InputError("the body ends before the last boundary of the form")
        await self._write()

    async def _write(self) -> None:
        piece, self._piece = bytes(self._piece), bytearray()
        if not piece:
            return
        self._quota.spend(len(piece))
        await in_thread(lambda: _append(self._upload.file, piece))

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise LimitExceeded(f"the form has more parts than the limit of {_MAX_PARTS}")
        self._name, self._value = "", bytearray()

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value)
            self._name = _text(options.get(b"name", b""), "the name of a part").removesuffix("[]")
        self._header = self._header_value = b""

    def _end_headers(self) -> None:
        if not self._name:
            raise InputError("a part of the form has no name; each part needs a header Content-Disposition with a name")
        if self._name == _FILE:
            if self._upload.num_bytes >= 0:
                raise InputError("the form has two parts named file; send one file", param=_FILE)
            self._upload.num_bytes = 0

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._upload.num_bytes += end - start
            self._piece += data[start:end]
            return
        self._num_value_bytes += end - start
        if self._num_value_bytes > _MAX_VALUE_BYTES:
            raise LimitExceeded(f"the fields of the form have more bytes than the limit of {_MAX_VALUE_BYTES}")
        self._value += data[start:end]

    def _end_part(self) -> None:
        if self._name != _FILE:
            value = _text(bytes(self._value), f"the value of {self._name[:40]!r}")
            self._upload.fields.setdefault(self._name, []).append(value)

    def _end(self) -> None:
        self._is_complete = True


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8") from error


def _append(path: Path, piece: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        view = memoryview(piece)
        while view:
            view = view[file.write(view) :]
