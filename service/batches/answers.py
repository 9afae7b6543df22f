"""The files with the answers of a batch, which are also its journal: a request whose line is there is not repeated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mindie_mm.processes.writing import write_all

_PREFIX = "batch_req_"


class AnswerBody(msgspec.Struct):
    """The part of an answer that is counted."""

    usage: dict[str, Any] | None = None


class AnswerResponse(msgspec.Struct):
    """The answer to a request."""

    status_code: int
    body: AnswerBody | None


class AnswerLine(msgspec.Struct):
    """A line. Only the part that is counted is decoded, because answers may be large."""

    id: str
    response: AnswerResponse | None

    @property
    def number(self) -> int:
        """Number of the line's request."""
        return int(self.id.rpartition("_")[2])


_decoder = msgspec.json.Decoder(AnswerLine)


class AnswerFile:
    """A file that grows by lines. Only the process that holds the batch's lock opens it."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Call `lines` before `append`."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._end = 0

    @property
    def num_bytes(self) -> int:
        """Size of the lines that have been read or appended."""
        return self._end

    def lines(self) -> Iterator[AnswerLine]:
        """Yield all lines, and remove what an earlier process did not write completely. Read them to the end."""
        self._end = 0
        with self.path.open("rb") as file:
            for line in file:
                try:
                    decoded = _decoder.decode(line)
                except msgspec.DecodeError:
                    break
                if not line.endswith(b"\n"):
                    break
                self._end += len(line)
                yield decoded
        os.ftruncate(self._file, self._end)

    def append(self, line: bytes) -> AnswerLine:
        """Append a line with its end, and return it. If this fails, remove what was written, and raise OSError."""
        try:
            write_all(self._file, memoryview(line), self._end)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)
        return _decoder.decode(line)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def answer_line(batch_id: str, number: int, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line for an answer in OpenAI's format. `number` is the request's, and `body` the answer's JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _line(batch_id, number, custom_id, response=response, error=None)


def error_line(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Return the line for a request without an answer."""
    return _line(batch_id, number, custom_id, response=None, error={"code": code, "message": message})


def _line(batch_id: str, number: int, custom_id: str, **rest: Any) -> bytes:
    line_id = f"{_PREFIX}{batch_id.removeprefix('batch_')}_{number}"
    return msgspec.json.encode({"id": line_id, "custom_id": custom_id, **rest}) + b"\n"
