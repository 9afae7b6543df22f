"""Reads the arguments that a model wrote as JSON. Nothing guarantees that the JSON is valid."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache

from mindie_mm.tool_calls.scanner import Scanner, Step

_CLOSING = {"{": "}", "[": "]"}
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonArguments(Scanner, ABC):
    """A scanner of JSON objects that sends them as the model wrote them, even if they are invalid."""

    @abstractmethod
    def send_arguments(self, text: str) -> None:
        """Receive a piece of the JSON."""

    def json_arguments(self, ends: Sequence[str]) -> Step[None]:
        """Read an object and send it unchanged, except that control characters in strings are escaped.

        The object ends with its closing bracket, or before one of the texts `ends` outside strings. Brackets within the
        object that are not closed, unquoted words and other mistakes are left to the caller of the service.
        """
        plain, firsts = _plain(tuple(ends)), {end[0] for end in ends}
        nested: list[str] = []
        while True:
            match = plain.match(self._text, self._at)
            assert match
            self._at = match.end()
            if self._at == len(self._text):
                yield from self._send_and_wait()
                continue
            character = self._text[self._at]
            if character in firsts:
                self.send_arguments(self.taken())
                if (yield from self.surely_follows(*ends)):
                    return
            if character in "}]" and character not in nested:
                break  # the bracket closes something around the object
            self._at += 1
            if character == '"':
                yield from self._rest_of_string()
            elif _ends_all(character, nested):
                break
        self.send_arguments(self.taken())

    def _rest_of_string(self) -> Step[None]:
        while True:
            match = _IN_STRING.match(self._text, self._at)
            assert match
            self._at = match.end()
            if self._at == len(self._text):
                yield from self._send_and_wait()
                continue
            character = self._text[self._at]
            if character == '"':
                self._at += 1
                return
            self.send_arguments(self.taken())
            if character == "\\":
                escape = yield from self.peek(2)
                self._at += 2
                if _CONTROL.match(escape, 1):  # a backslash before a real newline is a character of its own
                    self.taken()
                    self.send_arguments("\\\\" + _escaped(escape[1]))
            else:
                self._at += 1
                self.send_arguments(_escaped(self.taken()))

    def _send_and_wait(self) -> Step[None]:
        self.send_arguments(self.taken())
        yield from self.more()


def _ends_all(character: str, nested: list[str]) -> bool:
    """Update the list of expected closing brackets, and return whether all brackets are closed."""
    if character in _CLOSING:
        nested.append(_CLOSING[character])
    elif character in "}]":
        while nested.pop() != character:
            pass
    return not nested


def without_control_characters(text: str) -> str:
    """Return JSON in which the control characters within strings are escaped."""
    return _STRING.sub(lambda string: _CONTROL.sub(lambda match: _escaped(match[0]), string[0]), text)


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]


@cache
def _plain(ends: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of text outside strings that contains no bracket and begins none of the texts `ends`."""
    firsts = "".join(sorted({end[0] for end in ends}))
    return re.compile(rf'[^"{{}}\[\]{re.escape(firsts)}]*')
