"""Inserts media from a row's columns into the row's chat. Data sets for TRL have such rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.inputs import KINDS, Kind

_PLACE = frozenset({"type", "index"})
"""Keys of a message part that marks the place of a media item. The index is ignored, because exports number the items
in the order of the chat."""


def has_places(messages: Any) -> bool:
    """Return whether a chat has parts such as `{"type": "image"}`."""
    return isinstance(messages, list) and any(map(_kind_of_place, chain.from_iterable(map(_parts_of, messages))))


def has_question(messages: Any) -> bool:
    """Return whether the first question of a chat is a string, which media can precede."""
    return isinstance(messages, list) and isinstance(_question(messages).get("content"), str)


def with_media(messages: Sequence[Any], columns: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Replace the places for media in `messages` with the items of `columns`, in order. Each item has one key.

    If the messages have no places, the items precede the text of the first question, as in TRL's
    `prepare_multimodal_messages`.

    Raises:
        InputError: The number of places differs from the number of items.

    """
    if not has_places(messages) and has_question(messages):
        asked = _question(messages)
        parts = [{"type": _kind_of(item), **item} for item in columns]
        question = {**asked, "content": [*parts, {"type": "text", "text": asked["content"]}]}
        return [question if message is asked else message for message in messages]
    media: dict[Kind, list[Mapping[str, Any]]] = {kind: [] for kind in KINDS}
    for item in columns:
        media[_kind_of(item)].append(item)
    places = Counter(filter(None, map(_kind_of_place, chain.from_iterable(map(_parts_of, messages)))))
    for kind, items in media.items():
        if places[kind] != len(items):
            raise InputError(
                f"the row has {len(items)} items of kind {kind}, but its messages have places for {places[kind]}; "
                "the numbers must be equal"
            )
    left = {kind: iter(items) for kind, items in media.items()}

    def filled(part: Any) -> Any:
        kind = _kind_of_place(part)
        return {"type": kind, **next(left[kind])} if kind else part

    return [
        {**message, "content": list(map(filled, parts))} if (parts := _parts_of(message)) else message
        for message in messages
    ]


def _question(messages: Sequence[Any]) -> Mapping[str, Any]:
    """Return the first message of the user, or {}."""
    return next((one for one in messages if isinstance(one, Mapping) and one.get("role") == "user"), {})


def _kind_of(item: Mapping[str, Any]) -> Kind:
    return next(kind for kind in KINDS if any(kind in key for key in item))


def _parts_of(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _kind_of_place(part: Any) -> Kind | None:
    if not isinstance(part, Mapping) or any(value is not None for key, value in part.items() if key not in _PLACE):
        return None
    return next((kind for kind in KINDS if part.get("type") == kind), None)
