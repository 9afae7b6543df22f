"""The reason of a refusal, as the access log may show it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

MAX_CHARACTERS = 300
"""Maximum length of a reason in the log."""
MAX_SHARED = 11
"""Maximum number of consecutive characters outside quotation marks that a reason may have in common with a request."""
MIN_SHARED = 4
"""Minimum length of a whole text of the request that is masked outside quotation marks, unless it is one word."""
_MAX_MESSAGE = 2 * MAX_CHARACTERS
_MASK = "[...]"
_MAX_TEXT = 2**16
"""Number of characters to compare of each text. Messages quote the beginning of longer texts."""
_MAX_TEXTS = 2**20
"""Number of characters to compare of all texts. No reason is logged for a request with more."""
_TOO_LONG = "(not shown, because the request is too long to be compared with the reason)"
_MAX_INLINE = 2**16
"""Number of characters that are compared at once. For more, a thread does so."""
_QUOTED = re.compile(r"""(?<!\w)b?(["'`])((?:\\.|(?!\1).)*)(?:\1|$)""")
"""A quoted value, as `repr` and JSON write it. A message that was cut may lack the second quotation mark."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_FOREIGN = re.compile(r"\S*[^ -\[\]-~].*")
"""A word with a character that the service's own words lack, such as a backslash or a character that is not ASCII, and
everything after it."""
_KEY = re.compile(r"[A-Za-z_]{1,40}")
"""A key that may be the name of a field."""


async def note_reason(request: Request, message: str) -> None:
    """Store the reason why a request is refused, for the access log. `message` is sent to the client."""
    # A body that has not been read yet must not be awaited here. The route has stored what it read.
    body = getattr(request, "_body", b"")
    parsed = getattr(request, "_json", None) or getattr(request.state, "form", None) or body.decode("utf-8", "replace")
    sent = [parsed, request.scope["path"], request.url.query, *request.headers.values()]
    compared = asyncio.to_thread(loggable, message, sent) if len(body) > _MAX_INLINE else None
    request.state.reason = loggable(message, sent) if compared is None else await compared


def loggable(message: str, sent: Any) -> str:
    """Return `message` without what it quotes from the request, in one line of at most `MAX_CHARACTERS`.

    Messages quote the values that they refuse. A value may be a prompt, or a URL with a password. Masked are:

    - Values between quotation marks, except names that no text of the request contains.
    - Short texts of the request, and pieces of longer ones, without quotation marks, as in errors of libraries.
    - The first word with a character that the service's own words lack, and everything after it.

    Only the first line is returned, because parsers of regular expressions quote their source in further lines.

    Args:
        message: The message.
        sent: Texts of the request: a string, or a JSON value with strings.

    """
    texts = [_one_line(text[:_MAX_TEXT]).lower() for text in _texts(sent)]
    if sum(map(len, texts)) > _MAX_TEXTS:
        return _TOO_LONG
    joined = "\n".join(texts)
    line = message[:_MAX_MESSAGE].partition("\n")[0]

    def masked(quoted: re.Match[str]) -> str:
        is_own = _NAME.fullmatch(quoted[2]) and quoted[2].lower() not in joined
        return quoted[0] if is_own else f"{quoted[1]}{_MASK}{quoted[1]}"

    line = _QUOTED.sub(masked, _one_line(line))
    folded, length = line.lower(), MAX_SHARED + 1
    line = line if len(line) == len(folded) else folded
    pieces = {piece for at in range(len(line) - MAX_SHARED) if (piece := folded[at : at + length]) in joined}
    pieces |= {text for text in texts if MIN_SHARED <= len(text) < length and text in folded and not text.isalpha()}
    hidden: set[int] = set()
    for piece in pieces:
        for found in re.finditer(f"(?={re.escape(piece)})", folded):
            hidden.update(range(found.start(), found.start() + len(piece)))
    shown = "".join("\0" if at in hidden else letter for at, letter in enumerate(line))
    return _FOREIGN.sub(_MASK, re.sub("\0+", _MASK, shown))[:MAX_CHARACTERS].strip()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _texts(sent: Any) -> Iterator[str]:
    """Yield the texts of a JSON value, and the keys that are unlike the name of a field."""
    waiting = [sent]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            yield from (key for key in value if not _KEY.fullmatch(key))
