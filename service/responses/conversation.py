"""The items of a conversation: those of earlier responses, and those of the request's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from pydantic import TypeAdapter

from mindie_mm.errors import NotStored
from service.request.response_store import ResponseStore
from service.responses.body import InputItem, ReferenceItem, ResponsesBody

_ITEMS = TypeAdapter(list[InputItem])
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_REASONING = "rs_"
"""Beginning of the ids of reasoning items."""
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items of a conversation without references."""

    items: Sequence[tuple[InputItem, str]]
    """All items in order, each with its place in the request."""
    new: Sequence[dict[str, Any]]
    """The items of the request's input, each with an id."""


def conversation(body: ResponsesBody, store: ResponseStore, owner: bytes) -> Conversation:
    """Return the conversation that a request continues.

    Args:
        body: Body of the request.
        store: Stored responses.
        owner: Digest of the request's API key.

    Raises:
        NotStored: The request refers to a response or an item that is not stored. A reference to reasoning is left out
            instead, because models answer without their earlier reasoning, too.
        LimitExceeded: Too many responses precede the request.

    """
    earlier = store.conversation(owner, body.previous_response_id) if body.previous_response_id is not None else []
    new: list[dict[str, Any]] = []
    places = ["previous_response_id"] * len(earlier)
    for index, item in enumerate(body.input):
        if (found := _found(item, f"input[{index}]", store, owner)) is not None:
            new.append(found)
            places.append(f"input[{index}]")
    items = _ITEMS.validate_python([*earlier, *new])
    return Conversation(list(zip(items, places, strict=True)), new)


def _found(item: InputItem, where: str, store: ResponseStore, owner: bytes) -> dict[str, Any] | None:
    if not isinstance(item, ReferenceItem):
        given: dict[str, Any] = {"type": "message", **item.model_dump(mode="json", exclude_none=True)}
        return {"id": f"{_PREFIXES.get(given['type'], 'out')}_{token_hex(16)}", **given}
    found = store.item(owner, item.id)
    if found is None and not item.id.startswith(_REASONING):
        raise NotStored(
            f"{where} refers to the item {item.id[:_MAX_SHOWN]!r}, which {store.why_missing}; send the item itself, as "
            "clients do with store: false",
            param="input",
        )
    return found
