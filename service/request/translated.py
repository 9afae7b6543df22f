"""Chat messages that are made from a request in the format of another API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from mindie_mm.errors import InputError
from service.http.errors import mistakes_in_words
from service.schemas.openai_types import ChatBody

_PLACE = re.compile(r"\bmessages\[(\d+)\](?:\.content(?:\[(\d+)\])?)?")
"""Pattern of the name of a message, or of a part of its content, in error messages."""


class Translated:
    """Messages of a chat completion, with the place in the client's request that each of their parts comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._places: list[tuple[str, list[str]]] = []
        """Place of each message, and the places of its parts."""

    def add(self, message: dict[str, Any], place: str, parts: Sequence[tuple[dict[str, Any], str]] = ()) -> None:
        """Append a message.

        Args:
            message: The message. If there are `parts`, it gets the key `content`.
            place: Name of the message in the client's request.
            parts: Parts of the content, each with its name in the client's request. A single text becomes a string,
                because some chat templates support no list.

        """
        contents = [part for part, _ in parts]
        if len(contents) == 1 and contents[0]["type"] == "text":
            message["content"] = contents[0]["text"]
        elif contents:
            message["content"] = contents
        self.messages.append(message)
        self._places.append((place, [where for _, where in parts]))

    @contextmanager
    def naming_places(self) -> Iterator[None]:
        """Name places of the client's request in an InputError about a message."""
        try:
            yield
        except InputError as error:
            error.args = (_PLACE.sub(self._named, str(error)),)
            raise

    def _named(self, match: re.Match[str]) -> str:
        index, part = int(match[1]), match[2]
        if index >= len(self._places):
            return match[0]
        place, parts = self._places[index]
        return parts[int(part)] if part is not None and int(part) < len(parts) else place


def chat_body_of(fields: dict[str, Any]) -> ChatBody:
    """Return the body of a chat completion with these fields. Raise InputError if a field is not valid."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        mistakes = [{**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()]
        raise InputError(mistakes_in_words(mistakes)) from error


def text_part(text: str) -> dict[str, Any]:
    """Return the part of a chat message that is `text`."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Return the part of a chat message that is the image at `url`."""
    return {"type": "image_url", "image_url": {"url": url}}
