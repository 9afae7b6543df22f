"""Reads the arguments that a model wrote as JSON. Nothing guarantees that the JSON is valid."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache

from mindie_mm.tool_calls.scanner import Scanner, Step

_CLOSING = {"{": "}", "[": "]"}
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonArguments(Scanner, ABC):
    """A scanner of JSON objects that sends them as the model wrote them, even if they are invalid."""

    _json: list[str]
    """Pieces of the current arguments that were sent."""

    @abstractmethod
    def send_arguments(self, text: str) -> None:
        """Receive a piece of the JSON."""

    def json_arguments(self, ends: Sequence[str], is_over: Callable[[], Step[bool]]) -> Step[None]:
        """Read an object and send it unchanged, except that control characters in strings are escaped.

        A valid object ends with its closing bracket. Any other text may contain misplaced brackets, and is left to the
        caller of the service. It ends with a closing bracket only if nothing but the rest of the call follows.

        Args:
            ends: Texts before which the arguments end in any case, except within strings.
            is_over: Function that returns whether the rest of a call follows the text that was read. It may read this
                rest, and it raises Ended if the answer may have been cut off within the arguments.

        """
        plain, firsts = _plain(tuple(ends)), {end[0] for end in ends}
        nested: list[str] = []
        is_invalid = False
        self._json = []
        while True:
            character = yield from self._next_after(plain)
            if character in firsts:
                self._pass_on(self.taken())
                if (yield from self.surely_follows(*ends)):
                    return
            self._at += 1
            if character == '"':
                yield from self._rest_of_string()
                continue
            _match_brackets(character, nested)
            if character == "}" and (is_invalid or not nested):
                self._pass_on(self.taken())
                is_invalid = is_invalid or not (yield from self._is_valid())
                is_last = not is_invalid or (yield from is_over())
                self._at = self._kept
                if is_last:
                    return

    def _is_valid(self) -> Step[bool]:
        """Return whether the text sent so far is a whole JSON object.

        A quote directly after the object shows that a string contains quotes: `{"code": "f("}")"}`.
        """
        if (yield from self.at_end()) or self._text[self._at] != '"':
            return _is_json("".join(self._json))
        return False

    def _rest_of_string(self) -> Step[None]:
        while True:
            character = yield from self._next_after(_IN_STRING)
            if character == '"':
                self._at += 1
                return
            self._pass_on(self.taken())
            if character == "\\":
                escape = yield from self.peek(2)
                self._at += 2
                if _CONTROL.match(escape, 1):  # a backslash before a real newline is a character of its own
                    self.taken()
                    self._pass_on("\\\\" + _escaped(escape[1]))
            else:
                self._at += 1
                self._pass_on(_escaped(self.taken()))

    def _next_after(self, plain: re.Pattern[str]) -> Step[str]:
        """Read the text that `plain` matches, and return the next character without reading it."""
        while True:
            match = plain.match(self._text, self._at)
            assert match
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            self._pass_on(self.taken())
            yield from self.more()

    def _pass_on(self, text: str) -> None:
        self._json.append(text)
        self.send_arguments(text)


def _match_brackets(character: str, nested: list[str]) -> None:
    """Update the list of expected closing brackets. A bracket that nothing expects is ignored."""
    if character in _CLOSING:
        nested.append(_CLOSING[character])
    elif character in nested:
        while nested.pop() != character:
            pass


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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
