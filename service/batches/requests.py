"""The input of a batch: one JSON object with a request per line."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from service.batches.record import Mistake

MAX_MISTAKES = 100
"""Maximum number of mistakes to report."""
_MAX_ID = 512


class Limits(msgspec.Struct, frozen=True):
    """Limits of the service on batches."""

    requests: int
    """Maximum number of requests in a batch."""
    line_bytes: int
    """Maximum size of a line."""


ACCEPTED = Limits(requests=sys.maxsize, line_bytes=sys.maxsize - 1)
"""Limits on an input that an earlier process has accepted, perhaps with higher limits."""


class Request(msgspec.Struct):
    """One line."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    stream: Any = None


_decoder = msgspec.json.Decoder(Request)
_body_decoder = msgspec.json.Decoder(_Streamed)


class Requests:
    """The requests of a batch, which are read from disk one by one. Their numbers are numbers of lines from 1."""

    def __init__(self, path: Path, endpoint: str, limits: Limits) -> None:
        """Check all lines. Lines with nothing but spaces do not count."""
        self._path = path
        self._starts = array("Q")
        self._numbers = array("Q")
        self.mistakes: list[Mistake] = []
        seen: dict[str, int] = {}
        for number, start, line in self._lines(limits.line_bytes):
            if len(self._starts) >= limits.requests:
                self._note("too_many_requests", f"the batch has more than {limits.requests} requests", number)
                return
            if len(self.mistakes) >= MAX_MISTAKES:
                return
            self._starts.append(start)
            self._numbers.append(number)
            if (request := self._checked(line, number, endpoint)) is not None:
                first = seen.setdefault(request.custom_id, number)
                if first != number:
                    text = f"the custom_id {request.custom_id[:40]!r} is also that of line {first}"
                    self._note("duplicate_custom_id", text, number, "custom_id")
        if not self._starts:
            self._note("empty_file", "the input file has no requests", None)

    def __len__(self) -> int:
        return len(self._starts)

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of all requests."""
        yield from self._numbers

    def read(self, index: int) -> Request:
        """Return the request at `index`, counted from 0 in the order of `numbers`."""
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            return _decoder.decode(file.readline())

    def _lines(self, line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, offset and content of each line."""
        with self._path.open("rb") as file:
            number = start = 0
            while line := file.readline(line_bytes + 1):
                number += 1
                if len(line) > line_bytes:
                    self._note(
                        "line_too_long", f"the line has more than {line_bytes} bytes, which is the limit", number
                    )
                    return
                if line.strip():
                    yield number, start, line
                start += len(line)

    def _checked(self, line: bytes, number: int, endpoint: str) -> Request | None:
        try:
            request = _decoder.decode(line)
            body = _body_decoder.decode(request.body)
        except msgspec.ValidationError as error:
            self._note("invalid_request", f"the line is not a request: {error}", number)
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._note("invalid_json_line", f"the line is not valid JSON: {error}", number)
            return None
        if not 0 < len(request.custom_id) <= _MAX_ID:
            text = f"custom_id has {len(request.custom_id)} characters; it must have 1 to {_MAX_ID}"
            self._note("invalid_custom_id", text, number, "custom_id")
        if request.method != "POST":
            self._note("invalid_method", f"method={request.method[:40]!r} must be POST", number, "method")
        if request.url != endpoint:
            text = f"url={request.url[:40]!r} must be the endpoint of the batch, {endpoint}"
            self._note("mismatched_endpoint", text, number, "url")
        if body.stream:
            self._note("invalid_request", "stream is not supported in a batch; leave it out", number, "body.stream")
        return request

    def _note(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        self.mistakes.append({"code": code, "message": message, "param": param, "line": line})
