"""Events that parsers return. They represent the pieces of an answer, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Event at the start of a call."""

    index: int
    """Index of the call within the answer."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Event at the end of a call. A call that is cut off does not have this event.

    The arguments may be invalid JSON, because they are passed on as the model wrote them.
    """

    index: int


Event = Content | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class Call:
    """A call, assembled from its events."""

    id: str
    name: str
    arguments: str = ""
    """The JSON object with the arguments, as the model wrote it."""
    complete: bool = False


@dataclass(slots=True)
class Answer:
    """Content and calls, assembled from events."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Append the next events."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case CallStart(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallEnd(index):
                    self.calls[index].complete = True
