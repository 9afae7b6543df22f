"""Parsing of media sources that are texts: URL schemes, paths of `file:` URLs, `data:` URLs and bare base64.

The main process of the service imports this module, but not the modules for decoding.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote_to_bytes, urlsplit

import pybase64

from mindie_mm.errors import LimitExceeded, MediaError

MAX_URL_LENGTH = len("file://localhost") + 3 * 4096
"""Maximum length of a `file:` URL in characters: a path of the system's maximum length, with each byte as %XX."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,63}):")  # limited, so that a match does not scan long base64
WHITE_SPACE = " \t\n\r\f\v"
"""ASCII white space, which is allowed anywhere in base64."""
_MAX_TAIL = 128
"""Number of characters at the end of base64 in which to search for padding. White space may surround the padding."""
_MAX_DATA_HEAD = 256
"""Maximum number of characters before the data of a `data:` URL."""


def scheme_of(source: str) -> str:
    """Return the scheme of a URL in lower case, or an empty string if `source` is not a URL. Any scheme is allowed."""
    return match[1].lower() if (match := _SCHEME.match(source)) else ""


def file_url_path(url: str) -> str:
    """Return the path of a `file:` URL.

    Raises:
        MediaError: The URL is malformed, or its host is another machine.
        LimitExceeded: The URL is too long.

    """
    if len(url) > MAX_URL_LENGTH:
        raise LimitExceeded(f"the file: URL has {len(url)} characters; the limit is {MAX_URL_LENGTH}")
    try:
        parts = urlsplit(url)
        path = os.fsdecode(unquote_to_bytes(parts.path))
    except ValueError:
        raise MediaError("the file: URL is not valid") from None
    if (host := parts.netloc) not in {"", "localhost"}:
        raise MediaError(f"the file: URL has the host {host[:100]!r}; only local files can be read")
    return path


def base64_start(url: str) -> int:
    """Return the index at which the base64 of a `data:` URL begins. Raise MediaError if the URL contains no base64."""
    stop = url.find(",", 0, _MAX_DATA_HEAD)
    if not url[: max(0, stop)].lower().endswith(";base64"):
        raise MediaError("the data: URL must have the form data:<type>;base64,<data>")
    return stop + 1


def base64_size(text: str, start: int) -> int:
    """Return the decoded size in bytes of the base64 that begins at `start`. The base64 must be valid."""
    spaces = sum(text.count(space, start) for space in WHITE_SPACE if space in text)
    padding = min(2, text.count("=", max(start, len(text) - _MAX_TAIL)))
    return (len(text) - start - spaces) // 4 * 3 - padding


def decode_base64(text: str, start: int = 0) -> bytes:
    """Decode the base64 that begins at `start`. White space is ignored. Everything else must be strictly valid.

    Some encoders break base64 into lines (MIME, base64(1)), and decoders in Python and browsers ignore line breaks.

    Raises:
        MediaError: The base64 is not valid.

    """
    encoded: str | bytes = text[start:]
    try:
        if any(space in text for space in WHITE_SPACE):  # the search is six times as fast as the removal
            encoded = text[start:].encode("ascii").translate(None, WHITE_SPACE.encode())
        return pybase64.b64decode(encoded, validate=True)
    except ValueError as error:
        what = (
            "the base64 of the data: URL is not valid" if start else "the source is not a path, a URL or valid base64"
        )
        raise MediaError(
            f"{what}. Look for missing padding (=), invalid characters, and - or _ in place of + or /"
        ) from error
