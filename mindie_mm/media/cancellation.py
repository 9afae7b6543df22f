"""Whether somebody still waits for what is being decoded, as a tokenizer process, with one request at a time, is told.

Of this process as a whole; asked at each packet of a video or a sound, and at each frame that was handed in.
"""

from __future__ import annotations

from mindie_mm.errors import RequestAborted

_cancelled = False
"""No Event: its lock may be held where the signal comes."""


def cancel() -> None:
    """Nobody waits any more for the request in work. To be called in a signal's handler."""
    global _cancelled  # noqa: PLW0603 - a handler has nothing else to reach
    _cancelled = True


def begin() -> None:
    """Another request is in work."""
    global _cancelled  # noqa: PLW0603
    _cancelled = False


def check() -> None:
    """RequestAborted where nobody waits."""
    if _cancelled:
        raise RequestAborted("the request was given up while its media were decoded")
