"""Media sources written as text: URLs' schemes, the paths of `file:` URLs, base64 in `data:` URLs and bare.

Apart from the decoders, which a service's own process never loads.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote_to_bytes, urlsplit

import pybase64

from mindie_mm.errors import LimitExceeded, MediaError

MAX_URL_LENGTH = len("file://localhost") + 3 * 4096
"""Characters: of a path as long as the system takes, with each byte written as %XX."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,63}):")  # base64 that goes on without end is not searched for more
WHITE_SPACE = " \t\n\r\f\v"
"""Characters of ASCII that base64 may have anywhere."""
_MAX_TAIL = 128
"""Characters at the end of base64 that hold its padding, with white space."""
_MAX_DATA_HEAD = 256
"""Characters of a data: URL in front of its data."""


def scheme_of(source: str) -> str:
    """A URL's scheme in small letters, whether it is known or not; empty for what is no URL."""
    return found[1].lower() if (found := _SCHEME.match(source)) else ""


def file_url_path(url: str) -> str:
    """The path that a `file:` URL names. MediaError for another machine's; LimitExceeded for one that is too long."""
    if len(url) > MAX_URL_LENGTH:
        raise LimitExceeded(f"a file: URL of {len(url)} characters, the limit is {MAX_URL_LENGTH}")
    try:
        parts = urlsplit(url)
        path = os.fsdecode(unquote_to_bytes(parts.path))
    except ValueError:
        raise MediaError("a file: URL that is not valid") from None
    if (host := parts.netloc) not in {"", "localhost"}:
        raise MediaError(f"a file: URL with a host, {host[:100]!r}: files are of this machine")
    return path


def base64_start(url: str) -> int:
    """Find where the base64 of a `data:` URL begins. MediaError for a URL of another form."""
    stop = url.find(",", 0, _MAX_DATA_HEAD)
    if not url[: max(0, stop)].lower().endswith(";base64"):
        raise MediaError("a data: URL that is not of the form data:<type>;base64,<data>")
    return stop + 1


def base64_size(text: str, start: int) -> int:
    """Compute how many bytes the base64 from `start` on holds, if it is valid."""
    spaces = sum(text.count(space, start) for space in WHITE_SPACE if space in text)
    padding = min(2, text.count("=", max(start, len(text) - _MAX_TAIL)))
    return (len(text) - start - spaces) // 4 * 3 - padding


def decode_base64(text: str, start: int = 0) -> bytes:
    """Decode the base64 from `start` on, white space left out. MediaError where anything else is not strictly so.

    Encoders break base64 into lines (MIME, base64(1)), and the decoders of Python and of browsers pass over that.
    """
    encoded: str | bytes = text[start:]
    try:
        if any(space in text for space in WHITE_SPACE):  # to look for it is six times as fast as to leave it out
            encoded = text[start:].encode("ascii").translate(None, WHITE_SPACE.encode())
        return pybase64.b64decode(encoded, validate=True)
    except ValueError as error:
        what = "a data: URL whose base64 is not valid" if start else "neither a path, a URL nor valid base64"
        raise MediaError(
            f"{what}: padding (=) left out, a character that is none of it, or - and _ for + and /?"
        ) from error
