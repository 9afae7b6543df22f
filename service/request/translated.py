"""Chat messages that are made from a request in the format of another API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mindie_mm.errors import InputError
from service.http.errors import mistakes_in_words
from service.schemas.openai_types import ChatBody

_TOOL = re.compile(r"\btools(\[\d+\]|\.\d+)\.function\b")
"""Pattern of the name of a tool's function in error messages. In other APIs, a tool is the function itself."""
_CHOICE = '"function": {"name": ...}'
_PLACE = re.compile(r"\bmessages\[(\d+)\](?:\.content(?:\[(\d+)\])?)?")
"""Pattern of the name of a message, or of a part of its content, in error messages."""


Part = tuple[dict[str, Any], str]
"""A part of a chat message, and its place in the client's request."""
_SYSTEM = ("system", "developer")


@dataclass(slots=True)
class _Turn:
    message: dict[str, Any]
    place: str
    parts: list[Part]

    def finished(self) -> dict[str, Any]:
        """Return the message. A single text becomes a string, because some chat templates support no list."""
        contents = [part for part, _ in self.parts]
        if len(contents) == 1 and contents[0]["type"] == "text":
            return {**self.message, "content": contents[0]["text"]}
        return {**self.message, "content": contents or ""}


class Translated:
    """Messages of a chat completion. For each of their parts, the place in the client's request is known."""

    def __init__(
        self, field: str, names: Mapping[str, str], *, takes_late_system: bool, joins_turns: bool = False
    ) -> None:
        """Begin a chat.

        Args:
            field: Field of the client's request that contains the messages.
            names: Names of other fields in the client's request, by their names in a chat completion.
            takes_late_system: Whether the chat template accepts system messages that follow other messages. If not,
                their text becomes a part of the user's turn.
            joins_turns: Whether consecutive messages of the user, or of the assistant, are one message.

        """
        self._fields = {**names, "messages": field}
        distinct = [re.escape(name) for name in names if "_" in name]  # other names are ordinary words
        self._name = re.compile(rf"\b(?:{'|'.join(distinct)})\b" if distinct else "(?!)")
        self._takes_late_system = takes_late_system
        self._joins_turns = joins_turns
        self._turns: list[_Turn] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the chat completion."""
        return [turn.finished() for turn in self._turns]

    def add(self, message: dict[str, Any], place: str, parts: Sequence[Part] = ()) -> None:
        """Append a message. Leading system messages become one, because many chat templates accept only one.

        Args:
            message: The message without its content.
            place: Name of the message in the client's request.
            parts: Parts of the content.

        """
        last = self._turns[-1] if self._turns else None
        role, joins = message["role"], self._joins_turns
        if role in _SYSTEM:
            is_late = last is not None and last.message["role"] not in _SYSTEM
            if is_late and not self._takes_late_system:
                message, role, joins = {"role": "user"}, "user", True
            elif last is not None and not is_late:
                separator: list[Part] = [(text_part("\n\n"), place)]
                last.parts = _one_text([*last.parts, *separator, *parts])
                return
        if joins and last is not None and role in ("user", "assistant") and _can_join(last.message, role):
            last.message |= message
            last.parts += parts
            if role == "assistant":
                last.parts = _one_text(last.parts)
            return
        self._turns.append(_Turn(message, place, [*parts]))

    @contextmanager
    def naming_places(self) -> Iterator[None]:
        """Name fields and places of the client's request in an InputError about the chat completion."""
        try:
            yield
        except InputError as error:
            text = _TOOL.sub(r"tools\1", _PLACE.sub(self._named, str(error)))
            text = text.replace(_CHOICE, '"name": ...')
            error.args = (self._name.sub(lambda match: self._fields[match[0]], text),)
            if error.param is not None:
                error.param = self._fields.get(error.param, error.param)
            raise

    def _named(self, match: re.Match[str]) -> str:
        index, part = int(match[1]), match[2]
        if index >= len(self._turns):
            return match[0]
        turn = self._turns[index]
        return turn.parts[int(part)][1] if part is not None and int(part) < len(turn.parts) else turn.place


def _can_join(earlier: dict[str, Any], role: str) -> bool:
    """Return whether a message of `role` can become a part of an earlier one. Calls end a turn of the assistant."""
    return earlier["role"] == role and "tool_calls" not in earlier


def _one_text(parts: Sequence[Part]) -> list[Part]:
    """Return one text with all texts of `parts`, because many templates accept no list in this place."""
    return [(text_part("".join(part["text"] for part, _ in parts)), parts[0][1])] if parts else []


def chat_body_of(fields: dict[str, Any]) -> ChatBody:
    """Return the body of a chat completion with these fields. Raise InputError if a field is not valid."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        mistakes: list[dict[str, Any]] = [{**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()]
        raise InputError(mistakes_in_words(mistakes), param=str(mistakes[0]["loc"][1])) from error


def text_part(text: str) -> dict[str, Any]:
    """Return the part of a chat message that is `text`."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Return the part of a chat message that is the image at `url`."""
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}
