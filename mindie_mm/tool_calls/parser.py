"""The interface of tool-call parsers, and the code that all formats share."""

from __future__ import annotations

import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar

from mindie_mm.errors import InputError
from mindie_mm.structured.lark import Rules, json_value
from mindie_mm.tool_calls.events import CallArguments, CallEnd, CallStart, Content, Event
from mindie_mm.tool_calls.json_arguments import JsonArguments
from mindie_mm.tool_calls.scanner import MAX_NAME, NAME, Ended, NoMatch, Step
from mindie_mm.tool_calls.schemas import Tool

MAX_CALLS = 8
"""Maximum number of calls that a grammar allows. Without a limit, small models may repeat a call until max_tokens."""


class ToolCallParser(JsonArguments, ABC):
    """A parser that separates calls from content while text arrives.

    Text that may be the beginning of a call is held back, and becomes content if it turns out not to be a call. The
    arguments of a call are sent as JSON while they arrive. Methods "send" something by appending an event to the result
    of `push`. The answer that the events describe does not depend on the pieces in which the text arrives.

    A call that has started is completed, however invalid its arguments are, unless the answer is cut off within it. A
    call that has not started when it turns out to be invalid, or when the model ends its answer, becomes content.

    A subclass defines the `openings` of its calls. Its method `calls` parses the text after an opening.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Special tokens that must not be removed from the decoded text."""
    in_templates: ClassVar[tuple[str, ...]] = ()
    """Texts that only chat templates of this format contain. A template contains at least one of them."""
    openings: ClassVar[tuple[str, ...]] = ()
    """Texts that begin calls."""
    starts: ClassVar[tuple[str, ...]] = ()
    """Texts that may begin an answer if it consists of calls without an opening."""
    closings: ClassVar[tuple[str, ...]] = ()
    """Texts that end calls. They are never content after a call. In invalid calls, the text before them is dropped."""

    ends_reasoning: ClassVar[bool] = False
    """True if the model may call a tool within its reasoning, without ending the reasoning first."""
    tool_names: ClassVar[re.Pattern[str]] = NAME
    """Pattern of the tool names that the format can represent."""
    around: ClassVar[tuple[str, str, str]] = ("", "", "")
    """Texts that a model writes before the first call, between two calls and after the last call."""
    call_tags: ClassVar[tuple[str, str]] = ("", "")
    """Texts that a model writes before and after the arguments of a call. `{name}` stands for the tool's name."""

    def __init__(self, tools: Sequence[Tool] = (), num_earlier_calls: int = 0) -> None:
        """Create a parser for one answer.

        Args:
            tools: Tools that the request offers.
            num_earlier_calls: Number of calls in the chat before this answer. Some formats number the calls of the
                whole chat.

        """
        super().__init__()
        self.tools = {tool.name: tool for tool in tools}
        self.num_calls = 0
        """Number of calls that have started."""
        self.num_earlier_calls = num_earlier_calls
        self.in_call = False
        self.call_text = ""
        """Text of the current call so far. After the end of the answer, text of the call within which it was cut."""
        self._encode: Callable[[str], str] | None = None
        """Function that converts text to a piece of the arguments. None while the text is not part of arguments."""
        self._lead: int | None = None
        """Number of whitespace characters that are held back before an opening. None after the first event of a
        call."""
        self._pending: str | None = ""
        """Whitespace between content and a call. It is sent if more content follows. None within content."""
        self._events: list[Event] = []
        self._steps = self.answer()
        next(self._steps)

    @classmethod
    def detects(cls, template: str, vocabulary: Collection[str]) -> bool:
        """Return whether a checkpoint with this chat template and these added tokens uses this format."""
        return any(text in template for text in cls.in_templates)

    @classmethod
    def grammar(
        cls,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        one_of: Collection[str],
        added_tokens: Mapping[str, int],
        with_text: bool = False,
    ) -> str:
        """Return a grammar in llguidance's Lark syntax for answers that consist of calls.

        Args:
            tools: Tools that the request offers.
            parallel: Whether the answer may have several calls.
            one_of: Names of the tools that may be called.
            added_tokens: Ids of the tokenizer's added tokens. Literals in a grammar never match an added token.
            with_text: Whether calls are optional, and text is allowed before and after them. If so, at least one of the
                `openings` must be an added token, because the text cannot contain added tokens.

        Raises:
            InputError: The format cannot enforce the schema of a tool, or `one_of` does not name an offered tool.

        """
        if not any(tool.name in one_of for tool in tools):
            raise InputError(f"none of the offered tools is named {' or '.join(map(repr, one_of))}")
        if with_text and not any(opening in added_tokens for opening in cls.openings):
            raise InputError(
                "tool calls after text cannot be enforced, because no token of the vocabulary begins a call"
            )
        for tool in tools:
            if tool.name in one_of and not (cls.tool_names.fullmatch(tool.name) and len(tool.name) <= MAX_NAME):
                raise InputError(
                    f"the tool {tool.name[:MAX_NAME]!r} has a name that this tool-call format cannot write"
                )
        rules = Rules(added_tokens)
        before, between, after = map(rules.text, cls.around)
        repetition = f"({between} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        calls = " ".join(filter(None, [before, "call", repetition, after]))
        if with_text:
            text = rules.add("TEXT", r"/(.|\n)*/")
            rules.add("start", f"{text} | {text} calls {text}")
            rules.add("calls", calls)
        else:
            rules.add("start", calls)
        names = {tool.name: f"call{number}" for number, tool in enumerate(tools) if tool.name in one_of}
        rules.add("call", " | ".join(names.values()))
        for tool in tools:
            if tool.name in names:
                rules.add(names[tool.name], cls.call_rule(tool, rules))
        return str(rules)

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return the right side of a rule that matches calls to a tool. Further rules are added to `rules`."""
        before, after = map(rules.text, cls.tags_of(tool.name))
        return " ".join(filter(None, [before, cls.arguments_rule(tool, rules), after]))

    @classmethod
    def arguments_rule(cls, tool: Tool, rules: Rules) -> str:  # the arguments may not be JSON
        """Return a sequence that matches the arguments of a tool."""
        return json_value(tool.schema)

    @classmethod
    def tags_of(cls, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call to the tool `name`."""
        before, after = cls.call_tags
        return before.replace("{name}", name), after

    @abstractmethod
    def calls(self, opening: str) -> Step[None]:
        """Parse the calls after an opening. Raise NoMatch if the text is not a call."""

    def call_id(self, name: str) -> str:  # some formats put the name into the id
        """Return a new id for a call to the tool `name`."""
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    def history_id(cls, call_id: str, name: str, number: int) -> str:  # some templates require ids of a certain form
        """Return the id of call `number` of the chat, in the form that the chat template expects."""
        return call_id

    @classmethod
    def written(cls, name: str, arguments: str) -> str | None:
        """Return a call as the model writes it, without the texts of `around`.

        The default is None, for formats whose chat templates write the earlier calls of a chat.

        Args:
            name: Name of the tool.
            arguments: Arguments, usually as a JSON object.

        """
        return None

    def push(self, text: str) -> list[Event]:
        """Parse the next piece of the answer."""
        self.append(text)
        return self._resume()

    def finish(self, *, whole: bool = False) -> list[Event]:
        """Finish parsing. Call this method after the last piece.

        Args:
            whole: Whether the model ended the answer. If not, the answer was cut off, and a call at its end stays
                incomplete.

        """
        self.end(whole=whole)
        return self._resume()

    def taken(self) -> str:
        text = super().taken()
        self.call_text += text
        return text

    def _resume(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def answer(self) -> Step[None]:
        """Parse a whole answer."""
        if self.starts:
            yield from self.space()
            if (yield from self.follows(*self.starts)):
                self._lead = self._at - self._kept
                yield from self._attempt("")
        while opening := (yield from self.content_until(*self.openings)):
            yield from self._attempt(opening)

    def content_until(self, *literals: str) -> Step[str]:
        """Send the text up to the next of the literals. Read and return this literal, or "" at the end of the text."""
        literal, num_spaces = yield from self.sent_until(literals, self._send)
        if literal:
            self._lead = num_spaces
            return literal
        if self.num_calls == 0 or not self._text[self._kept :].isspace():
            self._send(len(self._text))
        return ""

    def more(self) -> Step[None]:
        """Send arguments that were read, and wait for more text."""
        self.flush()
        yield from super().more()

    def flush(self) -> None:
        """Send the text that was read, if it belongs to the arguments of a call."""
        if self._encode:
            self.send_arguments(self._encode(self.taken()))

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Send the event for the start of a call."""
        if self._lead is not None and self._pending is None:
            self._pending = self._text[self._kept : self._kept + self._lead]
        self._lead = None
        self._events.append(CallStart(self.num_calls, call_id or self.call_id(name), name))
        self.num_calls += 1
        self.in_call = True
        self.taken()

    def send_arguments(self, text: str) -> None:
        """Send a piece of the arguments of the current call."""
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """Send the event for the end of the current call."""
        self._events.append(CallEnd(self.num_calls - 1))
        self.in_call = False
        self.taken()
        self.call_text = ""

    def finish_call(self) -> None:
        """Complete the current call, whose arguments are invalid or end with the answer."""
        self.end_call()

    def call_ends(self) -> tuple[str, ...]:
        """Return the texts that end the arguments of a call if their brackets do not."""
        return (*self.closings, *self.openings)

    def object_call(self, name: str, call_id: str | None = None, *, ends: Sequence[str] = ()) -> Step[None]:
        """Read the arguments of a call, and send the call.

        The arguments are a JSON object. If one of `ends` follows instead, the call has no arguments.
        """
        yield from self.space()
        if ends and (yield from self.follows(*ends)):
            self.start_call(name, call_id)
            self.send_arguments("{}")
        elif (yield from self.peek()) == "{":
            self.start_call(name, call_id)
            ends = (*ends, *self.call_ends())
            yield from self.json_arguments(ends, partial(self.rest_follows, ends))
        else:
            raise NoMatch
        self.end_call()

    def rest_follows(self, literals: Sequence[str]) -> Step[bool]:
        """Read whitespace, and return whether the answer ends or one of the literals follows."""
        yield from self.space()
        return (yield from self.surely_at_end()) or bool((yield from self.surely_follows(*literals)))

    def close(self, *literals: str) -> Step[str]:
        """Read whitespace and one of the literals, and return the literal. If no literal follows, read nothing.

        If the answer ends within a literal, the beginning of the literal is dropped.
        """
        self.is_cut = False
        yield from self.space()
        if literal := (yield from self.accept(*literals)):
            self.taken()
        elif self.is_cut:
            self._drop()
        else:
            self._at = self._kept
        return literal

    def _send(self, stop: int) -> None:
        """Send the text before `stop` as content."""
        if stop > self._kept:
            self._events.append(Content((self._pending or "") + self._text[self._kept : stop]))
            self._kept = stop
            self._pending = None

    def _attempt(self, opening: str) -> Step[None]:
        """Parse the calls after an opening. Text that is not a call becomes content."""
        self.is_cut = False
        self._accepted = self.call_text = cut = ""
        try:
            yield from self.calls(opening)
        except NoMatch:
            if self.in_call:
                self.finish_call()
                yield from self._skip_rest()
            elif self.is_cut and opening and not self._is_whole:
                self._drop()
                cut = self.call_text
            else:
                self._leave_as_text(opening)
        except Ended:
            if self.in_call and self._is_whole:
                self.finish_call()
                self._drop()
            elif self._is_whole:
                self._leave_as_text(opening)
            elif opening or self.in_call:  # the beginning of a call is useless to the user
                self._drop()
                cut = self.call_text
        self._encode = None
        self.in_call = False
        has_called = self._lead is None
        if has_called and self.closings and not self._accepted.endswith(self.closings):
            yield from self._rest_of_block()
        self.call_text = cut

    def _rest_of_block(self) -> Step[None]:
        """Send the text up to the closing text as content, and drop the closing text."""
        if (yield from self.content_until(*self.closings, *self.openings)) in self.closings:
            self.taken()
        self._at = self._kept

    def _leave_as_text(self, opening: str) -> None:
        """Treat the text that was read since the last call, or since the opening, as content."""
        self._at = self._kept
        if self._lead is not None:
            self._send(self._kept + self._lead + len(opening))

    def _drop(self) -> None:
        self._at = len(self._text)
        self.taken()

    def _skip_rest(self) -> Step[None]:
        """Read the rest of an invalid call."""
        if not self.closings:
            self._at = self._kept
            return
        try:
            yield from self.until(*self.closings, at_most=sys.maxsize)
            yield from self.accept(*self.closings)
        except Ended:
            self._drop()
        self.taken()
