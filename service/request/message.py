"""Splits the text of a choice into the parts of a message: reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from tokenizers import Tokenizer

from mindie_mm.tokenize.text.detokenizer import TextStream
from mindie_mm.tool_calls.events import Answer, CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.reasoning import ReasoningFormat, ReasoningParser
from mindie_mm.tool_calls.schemas import Tool
from mindie_mm.worker.deltas import Answer as Output
from mindie_mm.worker.deltas import Delta
from service.schemas.openai_answers import ChatDelta, ChatFinishReason, ChatMessage, FunctionDelta, ToolCallDelta

Part = Reasoning | Event


@dataclass(frozen=True, slots=True)
class MessageRules:
    """Rules that turn the text of a request's choices into messages."""

    reasoning: ReasoningFormat | None = None
    """Format of the reasoning, or None if the model does not write reasoning."""
    opened: bool = False
    """True if the prompt already ends with the marker that starts the reasoning."""
    shows_reasoning: bool = True
    """True if the message includes the reasoning."""
    separates_reasoning: bool = True
    """True if the reasoning has fields of its own. If not, the content begins with the reasoning."""
    streams_reasoning: bool = True
    """True if a stream sends the reasoning in pieces. If not, it sends one piece when the reasoning ends."""
    parser: type[ToolCallParser] | None = None
    """Parser of the tool calls. If it is None, tool calls remain in the content."""
    tools: Sequence[Tool] = ()
    num_earlier_calls: int = 0
    """Number of tool calls in the request's messages."""
    parallel: bool = True
    """True if the message may have several tool calls. If not, only the first call is kept."""
    holds_calls: bool = False
    """True if a call is held back until it is complete, because a stop token may cut it off. It is then text."""
    as_function: bool = False
    """True if the call is written as OpenAI's deprecated `function_call`."""
    hidden: Sequence[str] = ()
    """Special tokens that the text contains for the parsers. They are removed from the content."""

    @property
    def is_plain(self) -> bool:
        """True if the content is the whole text."""
        return self.reasoning is None and self.parser is None

    def delta(self, content: ChatDelta) -> ChatDelta:
        """Return `content` with the keys of the reasoning, which clients of models that reason expect in each delta."""
        if self.reasoning is None or not self.shows_reasoning:
            return content
        return {"reasoning_content": None, "reasoning": None, **content}


class MessageReader:
    """Splits the text of one choice. The message does not depend on the pieces in which the text arrives."""

    def __init__(self, rules: MessageRules) -> None:
        self._rules = rules
        self._reasoning = (
            ReasoningParser(
                rules.reasoning, opened=rules.opened, parser=rules.parser, verbatim=not rules.separates_reasoning
            )
            if rules.reasoning
            else None
        )
        self._held = ""
        """Reasoning that was read but not yet returned."""
        self._calls = rules.parser(rules.tools, rules.num_earlier_calls) if rules.parser else None
        self._call: list[Event] = []
        """Events of the call that is held back."""

    def push(self, text: str) -> list[Part]:
        """Read the next piece of the text, and return the new parts. The beginning of a marker may be held back."""
        return self._read(self._reasoning.push(text) if self._reasoning else [Content(text)] if text else [])

    def finish(self, *, whole: bool, by_token: bool = False) -> list[Part]:
        """Return the remaining parts after the last piece of the text.

        Args:
            whole: Whether the model ended the text. If not, a limit or a stop string cut it off.
            by_token: Whether a token of `stop_token_ids` ended the text. A call whose arguments are incomplete is then
                text, as in vLLM.

        """
        parts = self._read(self._reasoning.finish() if self._reasoning else []) + self._released()
        if self._calls is None:
            return parts
        parts += self._kept(self._calls.finish(whole=whole and not by_token))
        call, self._call = self._call, []
        is_kept = self._rules.parallel or self._calls.num_calls == bool(call)
        if by_token and is_kept and (text := self._calls.call_text):
            if call and _is_json("".join(event.text for event in call if isinstance(event, CallArguments))):
                call.append(CallEnd(self._calls.num_calls - 1))
            else:
                call = [Content(self._without_hidden(text))]
        return parts + call

    def _read(self, parts: Iterable[Reasoning | Content]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                read += self._released()
                read += self._kept(self._calls.push(part.text) if self._calls else [part])
            elif not self._rules.shows_reasoning:
                continue
            elif not self._rules.separates_reasoning:
                read.append(Content(part.text))
            elif self._rules.streams_reasoning:
                read.append(part)
            else:
                self._held += part.text
        return read

    def _released(self) -> list[Part]:
        """Return the reasoning that was held back, and forget it."""
        text, self._held = self._held, ""
        return [Reasoning(text)] if text else []

    def _kept(self, events: Sequence[Event]) -> list[Part]:
        """Return the events without hidden tokens, and without the calls that `parallel` forbids."""
        kept: list[Part] = []
        for event in events:
            if not isinstance(event, Content):
                if self._rules.parallel or event.index == 0:
                    self._call.append(event)
                if isinstance(event, CallEnd) or not self._rules.holds_calls:
                    kept += self._call
                    self._call = []
            elif text := self._without_hidden(event.text):
                kept.append(Content(text))
        return kept

    def _without_hidden(self, text: str) -> str:
        for token in self._rules.hidden:
            text = text.replace(token, "")
        return text


@dataclass(slots=True)
class MessageParts:
    """The parts of one choice that have arrived so far."""

    reasoning: str = ""
    answer: Answer = field(default_factory=Answer)

    @classmethod
    def of(cls, output: Output, rules: MessageRules) -> Self:
        """Return the parts of a whole output."""
        parts, reader = cls(), MessageReader(rules)
        parts.add(reader.push(output.text))
        parts.add(reader.finish(whole=is_whole(output), by_token=isinstance(output.stop_reason, int)))
        return parts

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, Reasoning):
                self.reasoning += part.text
            else:
                self.answer.add([part])

    def finish_reason(self, reason: ChatFinishReason | None, rules: MessageRules) -> ChatFinishReason | None:
        """Return `tool_calls` if the choice stopped after a complete tool call, or else `reason`."""
        if reason != "stop" or not any(call.complete for call in self.answer.calls):
            return reason
        return "function_call" if rules.as_function else "tool_calls"

    def message(self, rules: MessageRules) -> ChatMessage:
        """Return the message of an answer that is not streamed."""
        calls = self.answer.calls
        content = self.answer.content
        message: ChatMessage = {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
            "reasoning_content": self.reasoning or None,
            "reasoning": self.reasoning or None,
        }
        if calls and rules.as_function:
            message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
        elif calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message


def is_whole(end: Output | Delta) -> bool:
    """Return whether the model ended the text itself. `end` has the reason why the text ended."""
    return end.finish_reason == "stop" and not isinstance(end.stop_reason, str)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def delta_of(part: Part, rules: MessageRules) -> ChatDelta | None:
    """Return the delta that streams `part`, or None for the end of a call, which has no delta."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, call_id, name):
            begun: FunctionDelta = {"name": name, "arguments": ""}
            call: ToolCallDelta = {"index": index, "id": call_id, "type": "function", "function": begun}
            return {"function_call": begun} if rules.as_function else {"tool_calls": [call]}
        case CallArguments(index, text):
            more: FunctionDelta = {"arguments": text}
            return (
                {"function_call": more} if rules.as_function else {"tool_calls": [{"index": index, "function": more}]}
            )
        case CallEnd():
            return None


class ReasoningCount:
    """Counts the tokens of one choice before its reasoning ends."""

    def __init__(self, tokenizer: Tokenizer, rules: MessageRules, silent: Collection[int] | None) -> None:
        """Create a counter. `silent` has the same meaning as in `TextStream`."""
        self._reasoning = rules.reasoning
        self._stream = TextStream(tokenizer, silent=silent)
        self._text = ""
        self._begun = rules.opened
        self._is_over = rules.reasoning is None
        self.num_tokens = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens."""
        for token_id in token_ids:
            if self._is_over or self._reasoning is None:
                return
            self._text += self._stream.push(token_id)
            self.num_tokens += 1
            if not self._begun:
                self._begin(self._reasoning.start.rstrip())
            if self._begun and self._reasoning.end in self._text:
                self._is_over = True
                self.num_tokens -= 1  # the token that ends the reasoning
            if self._begun:
                self._text = self._text[-len(self._reasoning.end) :]

    def _begin(self, start: str) -> None:
        head = self._text.lstrip()
        if head.startswith(start):
            self._begun = True
        elif not start.startswith(head):  # the answer begins with other text
            self._is_over = True
            self.num_tokens = 0
