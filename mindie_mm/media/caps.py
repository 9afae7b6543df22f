"""The caps under which media are opened. Families open media without knowing of them, so they are of the context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mindie_mm.config import MediaCaps

_caps: ContextVar[MediaCaps] = ContextVar("media_caps", default=MediaCaps())  # noqa: B039 - frozen


def caps() -> MediaCaps:
    """The caps of this context; the defaults where nobody set any."""
    return _caps.get()


@contextmanager
def under(these: MediaCaps) -> Iterator[None]:
    """Has media opened inside under `these`. What was opened keeps them, however late it is decoded."""
    token = _caps.set(these)
    try:
        yield
    finally:
        _caps.reset(token)
