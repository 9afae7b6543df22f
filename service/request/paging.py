"""Pages of lists, in the format of OpenAI's list endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

from typing_extensions import TypedDict

from mindie_mm.errors import InputError

_MAX_SHOWN = 80

Item = TypeVar("Item")


class Page(TypedDict, Generic[Item]):
    """A part of a list."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    """True if the list continues after `last_id`."""


def page_of(items: Sequence[Item], after: str | None, limit: int) -> Page[Item]:
    """Return the first `limit` items after the item with the id `after`, or from the start if it is None.

    Each item is a mapping with a key `id`. Raise InputError if the list has no item with the id `after`.
    """
    ids = [str(item["id"]) for item in items]  # type: ignore[index]
    if after is not None and after not in ids:
        raise InputError(f"after is {after[:_MAX_SHOWN]!r}, which is not in the list", param="after")
    start = 0 if after is None else ids.index(after) + 1
    shown = ids[start : start + limit]
    return {
        "object": "list",
        "data": [*items[start : start + limit]],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": start + limit < len(ids),
    }
