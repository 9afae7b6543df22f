"""`file:` URLs. Apart from the decoders, which a service's own process never loads."""

from __future__ import annotations

import os
from urllib.parse import unquote_to_bytes, urlsplit

from mindie_mm.errors import LimitExceeded, MediaError

MAX_URL_LENGTH = len("file://localhost") + 3 * 4096
"""Characters: of a path as long as the system takes, with each byte written as %XX."""


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
