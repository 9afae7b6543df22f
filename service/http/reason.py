"""The reason of a refusal, as the access log may show it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

MAX_CHARACTERS = 300
"""Maximum length of a reason in the log."""
MAX_QUOTED = 11
"""Maximum number of consecutive characters of a request that a reason may contain."""
_MAX_MESSAGE = 2 * MAX_CHARACTERS
_MASK = "[...]"
_WINDOW = (MAX_QUOTED + 1) // 2
_MAX_TEXT = 2**16
"""Number of characters to compare of each text. Messages quote the beginning of longer texts."""
_MAX_TEXTS = 2**20
"""Number of characters to compare of all texts. No reason is logged for a request with more."""
_TOO_LONG = "(not shown, because the request is too long to be compared with the reason)"
_MAX_INLINE = 2**16
"""Number of characters that are compared at once. For more, a thread does so."""
_MAX_KEY = 40


async def note_reason(request: Request, message: str) -> None:
    """Store the reason for which a request is refused, for the access log. `message` is sent to the client."""
    # A body that has not been read yet must not be awaited here. The route has stored the body that it read.
    body = getattr(request, "_body", b"")
    parsed = getattr(request, "_json", None) or body.decode("utf-8", "replace")
    sent = [parsed, request.scope["path"], request.url.query, *request.headers.values()]
    compared = asyncio.to_thread(loggable, message, sent) if len(body) > _MAX_INLINE else None
    request.state.reason = loggable(message, sent) if compared is None else await compared


def loggable(message: str, sent: Any) -> str:
    """Return `message` without what it quotes from the request, in one line of at most `MAX_CHARACTERS`.

    Messages quote the values that they refuse. A value may be a prompt, or a URL with a password. Each piece of more
    than `MAX_QUOTED` characters that the message and a text of the request have in common is therefore masked. This
    does not depend on how messages are written.

    Args:
        message: The message.
        sent: Texts of the request: a string, or a JSON value with strings.

    """
    message = message[:_MAX_MESSAGE].replace("\0", " ")
    folded = message.casefold()
    message = message if len(folded) == len(message) else folded
    texts = "\n".join(text[:_MAX_TEXT] for text in _texts(sent)).casefold()
    if len(texts) > _MAX_TEXTS:
        return _TOO_LONG
    hidden = [False] * len(message)
    length = MAX_QUOTED + 1
    # A common piece has at least two windows' length, so it contains one of the windows below.
    for start in range(0, len(folded) - _WINDOW + 1, _WINDOW):
        if folded[start : start + _WINDOW] not in texts:
            continue
        for first in range(max(start + _WINDOW - length, 0), start + 1):
            if len(piece := folded[first : first + length]) == length and piece in texts:
                hidden[first : first + length] = [True] * length
    shown = "".join("\0" if hide else letter for letter, hide in zip(message, hidden, strict=True))
    return " ".join(re.sub("\0+", _MASK, shown).split())[:MAX_CHARACTERS]


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
            yield from (key for key in value if len(key) > _MAX_KEY or not key.isidentifier())
