"""Calls that are written as JSON objects with a name and arguments."""

from __future__ import annotations

import json
from abc import ABC
from typing import Any

from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import MAX_NAME, NoMatch, Step

_ARGUMENTS = ("arguments", "parameters")
_OTHER = ("id", "type")


class JsonCallParser(ToolCallParser, ABC):
    """A parser of calls such as `{"name": "f", "arguments": {"a": 1}}`.

    The keys come in any order, and `parameters` stands for `arguments`. Arguments that the model has written as a
    string of JSON are decoded once.
    """

    def call_object(self, *, known_keys: bool = False) -> Step[None]:
        """Read a call.

        Args:
            known_keys: Whether an object with an unknown key is no call.

        """
        yield from self.expect("{")
        name = ""
        held = ""
        while not (yield from self._ends()):
            key = yield from self._text_of(self.string())
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            if key == "name" and not name:
                name = yield from self._text_of(self.string())
                if not 0 < len(name) <= MAX_NAME:
                    raise NoMatch
            elif key in _ARGUMENTS and not self._in_call and not held:
                held = yield from self._arguments(name)
            elif known_keys and key not in _OTHER:
                raise NoMatch
            else:
                yield from self.value()
            yield from self.space()
            yield from self._comma()
        if not name:
            raise NoMatch
        if not self._in_call:
            self.start_call(name)
            self.send_arguments(held or "{}")
        self.end_call()

    def _ends(self) -> Step[bool]:
        yield from self.space()
        return bool((yield from self.accept("}")))

    def _comma(self) -> Step[None]:
        if (yield from self.follows(",", "}")) != "}":
            yield from self.expect(",")

    def _arguments(self, name: str) -> Step[str]:
        """Read arguments. Send them if the name of the call is known, or return them."""
        opening = yield from self.peek()
        if opening == "{" and name:
            self.start_call(name)
            yield from self.stream_arguments()
            return ""
        if opening == '"':
            held = yield from self._text_of(self.string())
        else:
            held = yield from self._source(self.value())
        if held == "null":
            held = "{}"
        if not isinstance(_decoded(held), dict):
            raise NoMatch
        return held

    def _text_of(self, string: Step[None]) -> Step[str]:
        text = _decoded((yield from self._source(string)))
        assert isinstance(text, str)
        return text

    def _source(self, step: Step[None]) -> Step[str]:
        start = self._at - self._kept
        yield from step
        return self._text[self._kept + start : self._at]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise NoMatch from error
