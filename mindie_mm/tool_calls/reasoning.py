"""The reasoning that a model writes before its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from mindie_mm.errors import InputError
from mindie_mm.tool_calls.events import Content, Reasoning
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import Scanner, Step

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts before and after a model's reasoning."""

    start: str
    end: str

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether the prompt ends with the start text. If so, the model does not write the start text itself."""
        return prompt.rstrip(_SPACE).endswith(self.start.rstrip(_SPACE))


FORMATS: Mapping[str, ReasoningFormat] = {
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>"),
    "glm45": ReasoningFormat("<think>", "</think>"),
}
"""Reasoning formats by name, in the order in which they are looked for in a chat template."""


class ReasoningParser(Scanner):
    """A parser that separates reasoning from the rest of an answer while text arrives.

    The reasoning is at the beginning of the answer, or begins in the prompt. Its start and end texts and the whitespace
    around them are dropped, unless the parser is `verbatim`.
    """

    def __init__(
        self,
        known: ReasoningFormat,
        *,
        opened: bool = False,
        parser: type[ToolCallParser] | None = None,
        verbatim: bool = False,
    ) -> None:
        """Create a parser for one answer.

        Args:
            known: Format of the reasoning.
            opened: Whether the prompt ends with the start text of the reasoning.
            parser: Parser of tool calls. Its format may allow the model to end the reasoning with a call.
            verbatim: Whether the events together are the whole text. The start and end texts then belong to the
                reasoning.

        """
        super().__init__()
        self._format = known
        self._verbatim = verbatim
        self._openings = parser.openings if parser and parser.ends_reasoning else ()
        self._closings = parser.closings if parser and parser.ends_reasoning else ()
        self.is_over = False
        """True if the reasoning has ended or does not exist."""
        self._events: list[Reasoning | Content] = []
        self._steps = self._answer(opened)
        next(self._steps)

    def push(self, text: str) -> list[Reasoning | Content]:
        """Parse the next piece of the answer."""
        self.append(text)
        return self._resume()

    def finish(self) -> list[Reasoning | Content]:
        """Finish parsing. Call this method after the last piece."""
        self.end()
        return self._resume()

    def _resume(self) -> list[Reasoning | Content]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _answer(self, opened: bool) -> Step[None]:
        yield from self.space()
        if (yield from self.accept(self._format.start, self._format.start.rstrip(_SPACE))) or opened:
            yield from self.space()
            self._drop()
            yield from self._reasoning()
        self.is_over = True
        while not self._ended:
            self._send(Content, len(self._text))
            yield from self.more()
        self._send(Content, len(self._text))

    def _reasoning(self) -> Step[None]:
        """Send the reasoning. Drop whitespace before and after the end text."""
        literals = (self._format.end, *self._openings)
        while True:
            literal, num_spaces = yield from self.sent_until(literals, partial(self._send, Reasoning))
            if literal in self._openings:
                if (yield from self._ends_in_call(num_spaces)):
                    return
                continue
            if literal:
                yield from self.space()
            else:
                self._at = len(self._text)
            self._drop()
            return

    def _ends_in_call(self, start: int) -> Step[bool]:
        """Wait for the end of the reasoning or of the answer. Return whether the answer ends with a call."""
        end = self._format.end
        while (stop := self._text.find(end, self._at)) < 0 and not self._ended:
            self._at = max(self._at, len(self._text) - len(end))
            yield from self.more()
        if stop < 0 and self._text.rstrip(_SPACE).endswith(self._closings):
            self._at = self._kept + start
            self._drop()
            return True
        text = self._text[self._kept : stop if stop >= 0 else None].rstrip(_SPACE)
        self._send(Reasoning, self._kept + len(text))
        return False

    def _drop(self) -> None:
        """Drop the text that was read. A verbatim parser sends this text first."""
        if self._verbatim:
            self._send(Reasoning, self._at)
        self._kept = self._at

    def _send(self, kind: type[Reasoning | Content], stop: int) -> None:
        if stop > self._kept:
            self._events.append(kind(self._text[self._kept : stop]))
            self._kept = stop


def reasoning_named(name: str) -> ReasoningFormat:
    """Return the reasoning format `name`. Raise InputError if there is no such format."""
    if name not in FORMATS:
        raise InputError(f"there is no reasoning format named {name!r}; the formats are {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def reasoning_for(template: str) -> ReasoningFormat | None:
    """Return the format of reasoning that a chat template contains, or None if it contains no known format."""
    return next((known for known in FORMATS.values() if known.end in template), None)
