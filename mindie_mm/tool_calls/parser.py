"""The interface of the parsers, and what all formats share."""

from __future__ import annotations

import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from mindie_mm.tool_calls.events import CallArguments, CallEnd, CallStart, Content, Event
from mindie_mm.tool_calls.scanner import Ended, NoMatch, Scanner, Step, partial, pattern
from mindie_mm.tool_calls.tool import Tool

_SPACE = " \t\r\n"


class ToolCallParser(Scanner, ABC):
    """A parser that separates calls from content while the model writes.

    Text that may still become a call is held back. Text that turns out to be no call is content. The arguments of a
    call are sent as the model writes them, in JSON. The pieces in which the text arrives do not change the result.

    A subclass states the `openings` of its calls, and reads what follows an opening in `calls`.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Special tokens that must be kept in the decoded text."""
    openings: ClassVar[tuple[str, ...]] = ()
    """Texts with which calls begin."""
    closings: ClassVar[tuple[str, ...]] = ()
    """Texts with which calls end. After an invalid call, the text up to here is lost."""

    def __init__(self, tools: Sequence[Tool] = (), num_earlier_calls: int = 0) -> None:
        """Start an answer.

        Args:
            tools: Tools that the request offers.
            num_earlier_calls: Number of calls in the chat before this answer. Some formats count on from there.

        """
        super().__init__()
        self.tools = {tool.name: tool for tool in tools}
        self._num_earlier_calls = num_earlier_calls
        self._num_calls = 0
        self._in_call = False
        self._streams = False
        """Whether the text being read is sent as arguments of the call."""
        self._lead: int | None = None
        """Number of white space characters that are held back before an opening. None after the first event."""
        self._events: list[Event] = []
        self._steps = self.answer()
        next(self._steps)

    @classmethod
    @abstractmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether a checkpoint with this chat template and these added tokens writes the format."""

    @classmethod
    @abstractmethod
    def grammar(
        cls, tools: Sequence[Tool], *, parallel: bool, one_of: Sequence[str], added_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar, in the Lark of llguidance, of an answer that is nothing but calls.

        Args:
            tools: Tools that the request offers.
            parallel: Whether the answer may have several calls.
            one_of: Names of the tools that may be called.
            added_tokens: Ids of the added tokens of the vocabulary, because a literal never matches an added token.

        """

    @abstractmethod
    def calls(self, opening: str) -> Step[None]:
        """Read the calls after an opening. Raise NoMatch where the text is no call."""

    def call_id(self, name: str) -> str:  # some formats write the name into the id
        """Return a new id for a call of the tool `name`."""
        return f"call_{secrets.token_hex(12)}"

    def push(self, text: str) -> list[Event]:
        """Parse the next piece of the answer."""
        self._append(text)
        return self._resume()

    def finish(self) -> list[Event]:
        """Parse the end of the answer. No text may follow."""
        self._ended = True
        return self._resume()

    def _resume(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def answer(self) -> Step[None]:
        """Read a whole answer."""
        while opening := (yield from self.content_until(*self.openings)):
            try:
                yield from self.calls(opening)
            except NoMatch:
                yield from self._recover(opening)
            except Ended:  # an opening without its call is of no use to the reader
                return

    def content_until(self, *literals: str) -> Step[str]:
        """Send the text up to one of the literals, read the literal and return it, or "" at the end of the text.

        White space before the literal stays held back. It belongs to the format if a call follows.
        """
        while True:
            self._at = self._kept
            if found := pattern(literals).search(self._text, self._at):
                self._send_content(found.start())
                self._lead = found.start() - self._kept
                self._at = found.end()
                return found[0]
            if self._ended:
                break
            self._send_content(len(self._text) - partial(self._text, literals))
            yield from self.more()
        if self._num_calls == 0 or not self._text[self._kept :].isspace():
            self._send(len(self._text))
        return ""

    def more(self) -> Step[None]:
        """Wait for more text. Meanwhile, the arguments that were read are sent."""
        if self._streams:
            self.send_arguments(self._taken())
        yield from super().more()

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Send the start of a call."""
        self._events.append(CallStart(self._num_calls, call_id or self.call_id(name), name))
        self._num_calls += 1
        self._in_call = True
        self._lead = None
        self._taken()

    def send_arguments(self, text: str) -> None:
        """Send a piece of the arguments of the current call."""
        if text:
            self._events.append(CallArguments(self._num_calls - 1, text))

    def stream_arguments(self) -> Step[None]:
        """Read a JSON object and send it, while it arrives, as the arguments of the current call."""
        self._taken()
        self._streams = True
        yield from self.value()
        self.send_arguments(self._taken())
        self._streams = False

    def end_call(self) -> None:
        """Send the end of the current call."""
        self._events.append(CallEnd(self._num_calls - 1))
        self._in_call = False
        self._taken()

    def close(self, *literals: str) -> Step[str]:
        """Read white space and one of the literals, or nothing, and return the literal or ""."""
        yield from self.space()
        if literal := (yield from self.accept(*literals)):
            self._taken()
        else:
            self._at = self._kept
        return literal

    def _taken(self) -> str:
        """Return the text that was read since the last call of this method, and keep it no longer."""
        text = self._text[self._kept : self._at]
        self._kept = self._at
        return text

    def _send_content(self, stop: int) -> None:
        """Send the text before `stop`, without the white space at its end."""
        self._send(self._kept + len(self._text[self._kept : stop].rstrip(_SPACE)))

    def _send(self, stop: int) -> None:
        if stop > self._kept:
            self._events.append(Content(self._text[self._kept : stop]))
            self._kept = stop

    def _recover(self, opening: str) -> Step[None]:
        """Go on after text that is no call."""
        if self._in_call:
            if self._streams:
                self.send_arguments(self._taken())
            self._in_call = self._streams = False
            try:
                yield from self.until(*self.closings, at_most=sys.maxsize)
                yield from self.accept(*self.closings)
            except Ended:
                self._at = len(self._text)
            self._taken()
        elif self._lead is not None:
            self._send(self._kept + self._lead + len(opening))
