"""The items of a conversation: those of earlier responses, and those of the request's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from pydantic import TypeAdapter

from mindie_mm.errors import LimitExceeded, NotStored
from service.request.response_store import ResponseStore
from service.responses.body import InputItem, ReferenceItem, ResponsesBody

_ITEMS = TypeAdapter(list[InputItem])
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_REASONING = "rs_"
"""Beginning of the ids of reasoning items."""
MAX_ITEMS = 4096
"""Maximum number of items in a conversation."""
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
        LimitExceeded: Too many responses precede the request, or there are too many items.

    """
    earlier = store.conversation(owner, body.previous_response_id) if body.previous_response_id is not None else []
    if len(earlier) + len(body.input) > MAX_ITEMS:
        raise LimitExceeded(
            f"the conversation has {len(earlier) + len(body.input)} items; the limit is {MAX_ITEMS}", param="input"
        )
    items = [(item, "previous_response_id") for item in _ITEMS.validate_python(earlier)]
    new: list[dict[str, Any]] = []
    seen = {item["id"] for item in earlier}
    name = token_hex(12)
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if isinstance(item, ReferenceItem):
            if (found := _found(item, where, store, owner)) is None:
                continue
            (item,) = _ITEMS.validate_python([found])  # noqa: PLW2901 - the item in place of the reference
        given: dict[str, Any] = {"type": "message", **item.model_dump(exclude_none=True)}
        if given.get("id") in {None, *seen}:  # ids must be unique, because pages of items begin after an id
            given = {**given, "id": f"{_PREFIXES.get(given['type'], 'out')}_{name}_{index}"}
        seen.add(given["id"])
        new.append(given)
        items.append((item, where))
    return Conversation(items, new)


def _found(item: ReferenceItem, where: str, store: ResponseStore, owner: bytes) -> dict[str, Any] | None:
    found = store.item(owner, item.id)
    if found is None and not item.id.startswith(_REASONING):
        raise NotStored(
            f"{where} refers to the item {item.id[:_MAX_SHOWN]!r}, which {store.why_missing}; send the item itself, as "
            "clients do with store: false",
            param="input",
        )
    return found
