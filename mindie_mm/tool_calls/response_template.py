"""Formats that a checkpoint defines with the `response_template` of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from mindie_mm.errors import InputError
from mindie_mm.structured.lark import Rules
from mindie_mm.tool_calls.events import CallArguments, CallEnd, CallStart, Content, Event
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import Step
from mindie_mm.tool_calls.schemas import Tool

_CALLS = "tool_calls"


class ResponseTemplateParser(ToolCallParser):
    """A parser that applies a response template with transformers' parser.

    A call is sent only when it is complete, because its arguments might not be written in JSON. From an invalid call
    on, all text is content. The parser receives text without reasoning.
    """

    template: ClassVar[Mapping[str, Any]]
    """Response template of the checkpoint."""
    known: ClassVar[type[ToolCallParser] | None] = None
    """Format that was detected in the chat template, if any. Its texts, grammar and ids are used."""

    def __init__(self, tools: Sequence[Tool] = (), num_earlier_calls: int = 0) -> None:
        """Create a parser for one answer."""
        # Imported only here, because loading transformers takes seconds.
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        super().__init__(tools, num_earlier_calls)
        self._known = self.known(tools, num_earlier_calls) if self.known else None
        functions = [{"name": tool.name, "parameters": tool.schema} for tool in tools]
        self._parser = ResponseParser(dict(self.template), prefix="", tools=functions)
        field = load_response_template(dict(self.template)).fields.get(_CALLS)
        self._ends_with_answer = field is not None and (field.close_re is None or bool(field.close_re.fullmatch("")))
        self._open: str | None = None
        self._is_cut = False
        self._unsent = ""
        """Text that is neither content nor part of a complete call yet."""
        self._failed = False

    @classmethod
    def of(cls, template: Mapping[str, Any], known: type[ToolCallParser] | None) -> type[ToolCallParser]:
        """Create a parser class for a response template.

        Raises:
            InputError: transformers cannot read the template.

        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            load_response_template(dict(template))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"the response_template of the tokenizer cannot be read: {error}") from error
        own = {name: getattr(known, name) for name in ("markers", "openings", "starts")} if known else {}
        return type(cls.__name__, (cls,), {"template": template, "known": known, **own})

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
        """Return the grammar of the known format."""
        return cls._required().grammar(
            tools, parallel=parallel, one_of=one_of, added_tokens=added_tokens, with_text=with_text
        )

    @classmethod
    def call_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return the rule of the known format."""
        return cls._required().call_rule(tool, rules)

    @classmethod
    def _required(cls) -> type[ToolCallParser]:
        if cls.known is None:
            raise InputError("tool calls cannot be required, because this checkpoint's tool-call format has no grammar")
        return cls.known

    def answer(self) -> Step[None]:
        """Read nothing, because transformers parses the text."""
        yield

    def calls(self, opening: str) -> Step[None]:
        """Read nothing, because transformers parses the text."""
        yield

    def call_id(self, name: str) -> str:
        """Return an id in the known format."""
        if self._known is None:
            return super().call_id(name)
        self._known.num_calls = self.num_calls
        return self._known.call_id(name)

    @classmethod
    def history_id(cls, call_id: str, name: str, number: int) -> str:
        """Return an id in the known format."""
        return call_id if cls.known is None else cls.known.history_id(call_id, name, number)

    def push(self, text: str) -> list[Event]:
        """Parse the next piece of the answer.

        Each character is parsed separately. If a piece of text contains an invalid call, transformers drops all events
        of this piece.
        """
        events: list[Event] = []
        for character in text:
            if not self._failed:
                self._unsent += character
                self._feed(events, partial(self._parser.feed, character))
            else:
                events.append(Content(character))
        return _merged(events)

    def finish(self, *, whole: bool = False) -> list[Event]:
        """Finish parsing. An incomplete call becomes content, or is dropped if the answer was cut off."""
        events: list[Event] = []
        if not self._failed:
            self._is_cut = self._open == _CALLS and not self._ends_with_answer
            if self._is_cut and whole:
                events.append(Content(self._unsent))
            self._feed(events, lambda: self._parser.finalize()[1])
        return _merged(events)

    def _feed(self, events: list[Event], parse: Callable[[], Iterable[dict[str, Any]]]) -> None:
        try:
            for event in parse():
                self._translate(event, events)
        except (ValueError, KeyError, TypeError):  # the text of a call does not match the template
            self._failed = True
            self._open = None
            if not self._is_cut:
                events.append(Content(self._unsent))

    def _translate(self, event: dict[str, Any], events: list[Event]) -> None:
        match event:
            case {"type": "region_open", "field": field}:
                self._open = field
            case {"type": "region_chunk", "field": "content", "text": text}:
                events.append(Content(text))
                self._unsent = self._unsent.partition(text)[2]
            case {"type": "region_close", "field": field}:
                self._open = None
                self._unsent = ""
                if field == _CALLS and not self._is_cut:
                    events += self._calls_in(event["value"])

    def _calls_in(self, value: Any) -> list[Event]:
        events: list[Event] = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call)
            name = str(function["name"])
            arguments = function.get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            events += [
                CallStart(self.num_calls, self.call_id(name), name),
                CallArguments(self.num_calls, text),
                CallEnd(self.num_calls),
            ]
            self.num_calls += 1
        return events


def _merged(events: list[Event]) -> list[Event]:
    """Join consecutive pieces of content."""
    merged: list[Event] = []
    for event in events:
        if isinstance(event, Content) and merged and isinstance(merged[-1], Content):
            merged[-1] = Content(merged[-1].text + event.text)
        else:
            merged.append(event)
    return merged
