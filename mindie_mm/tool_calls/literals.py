"""Converts Python literals and similar literals to JSON while the text arrives."""

from __future__ import annotations

import json
import math
import re
import string
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from mindie_mm.tool_calls.scanner import SCALAR, WORD, Ended, NoMatch, Scanner, Step

MAX_DEPTH = 64
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_BRACKETS = {"[": "]", "(": ")"}
_PLAIN = {quote: re.compile(rf"[^\\{quote[0]}]*") for quote in ("'", '"', "'''", '"""')}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'", '"': '"'}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL = re.compile(r"[0-7]{1,3}")


class LiteralScanner(Scanner, ABC):
    """A scanner of Python literals and similar literals, such as `{'a': [True, None, 1_000]}`."""

    def __init__(self) -> None:
        """Create a scanner without text."""
        super().__init__()
        self._open: list[str] = []
        """Ends of the JSON strings, arrays and objects that have begun, with the outermost first."""

    @abstractmethod
    def send_arguments(self, text: str) -> None:
        """Receive a piece of the JSON."""

    def literal(self, depth: int = 0) -> Step[None]:
        """Read a literal and send it as JSON."""
        self.taken()
        if depth > MAX_DEPTH:
            raise NoMatch
        if opening := (yield from self.accept("[", "(")):
            yield from self._items(_BRACKETS[opening], depth)
        elif (yield from self.accept("{")):
            yield from self.members("}", self.key, depth)
        elif not (yield from self.literal_string()):
            self.send_arguments((yield from self._scalar_literal()))
        self.taken()

    def members(self, closing: str, key: Callable[[], Step[None]], depth: int = 0) -> Step[None]:
        """Read the members of an object after its opening bracket, and send the members as JSON.

        `key` reads a key and sends it.
        """
        separator = "{"
        self._open.append("{}")
        while not (yield from self._closes(closing)):
            self.send_arguments(separator)
            self._open[-1] = "}"
            self.taken()
            yield from key()
            yield from self.space()
            self.send_arguments(": ")
            yield from self.literal(depth + 1)
            yield from self._comma(closing)
            separator = ", "
        self.send_arguments(self._open.pop())

    def any_members(self, closing: str, key: Callable[[], Step[None]], ends: Sequence[str] = ()) -> Step[None]:
        """Read members like `members`. From the first mistake on, send the text as the model wrote it.

        This text ends with `closing`, outside further brackets, or before one of the texts `ends`.
        """
        self._open = []
        try:
            yield from self.members(closing, key)
        except NoMatch:
            yield from self._as_written(closing, ends)

    def unfinished(self) -> str:
        """Return the text that closes the JSON sent so far."""
        return "".join(reversed(self._open))

    def _as_written(self, closing: str, ends: Sequence[str]) -> Step[None]:
        depth = sum(end != '"' for end in self._open) - 1
        self._open = ["}"]
        self._at = self._kept
        while True:
            if self._at == len(self._text):
                self.send_arguments(self.taken())
            character = yield from self.peek()
            if (character == closing and not depth) or (ends and (yield from self.surely_follows(*ends))):
                break
            self._at += 1
            depth = max(0, depth + (character in "([{") - (character in ")]}"))
        self.send_arguments(self.taken() + self._open.pop())
        yield from self.accept(closing)
        self.taken()

    def key(self) -> Step[None]:
        """Read a key and the colon after it, and send the key as JSON."""
        key = "" if (yield from self.literal_string()) else json.dumps((yield from self._scalar_literal()))
        yield from self.space()
        yield from self.expect(":")
        self.send_arguments(key)

    def literal_string(self) -> Step[bool]:
        """If a string follows, read it and send it as JSON. Return whether a string followed."""
        quote = yield from self.surely_accept("'''", '"""', "'", '"')
        if not quote:
            return False
        self._open.append('"')
        self.send_arguments('"')
        self.taken()
        while not (yield from self.ends_string(quote)):
            match = _PLAIN[quote].match(self._text, self._at)
            assert match
            if match[0]:
                self._at = match.end()
                text = match[0]
            elif (yield from self.peek()) == "\\":
                text = yield from self._escape()
            else:  # a quote that does not end the string
                self._at += 1
                text = quote[0]
            self.send_arguments(escaped(text))
            self.taken()
            if self._at == len(self._text):
                yield from self.more()
        self.send_arguments(self._open.pop())
        return True

    def ends_string(self, quote: str) -> Step[bool]:
        """If `quote` follows and ends the string, read it. Return whether it ended the string."""
        return bool((yield from self.surely_accept(quote)))

    def _items(self, closing: str, depth: int) -> Step[None]:
        separator = "["
        self._open.append("[]")
        while not (yield from self._closes(closing)):
            self.send_arguments(separator)
            self._open[-1] = "]"
            yield from self.literal(depth + 1)
            yield from self._comma(closing)
            separator = ", "
        self.send_arguments(self._open.pop())

    def _closes(self, closing: str) -> Step[bool]:
        yield from self.space()
        return bool((yield from self.accept(closing)))

    def _comma(self, closing: str) -> Step[None]:
        yield from self.space()
        if not (yield from self.follows(closing)):
            yield from self.expect(",")

    def _escape(self) -> Step[str]:
        """Read a Python escape sequence and return the text that it represents."""
        letter = (yield from self.peek(2))[1]
        if letter in _NUM_DIGITS:
            digits = (yield from self.peek(2 + _NUM_DIGITS[letter]))[2:]
            self._at += 2 + len(digits)
            if not set(digits) <= set(string.hexdigits) or int(digits, 16) > sys.maxunicode:
                raise NoMatch
            return chr(int(digits, 16))
        if letter in "01234567":
            octal = _OCTAL.match((yield from self.peek(5)), 1)  # a closing quote and more text follow the digits
            assert octal
            self._at += octal.end()
            return chr(int(octal[0], 8))
        self._at += 2
        return "" if letter == "\n" else _ESCAPES.get(letter, "\\" + letter)

    def _scalar_literal(self) -> Step[str]:
        length = 0
        while True:
            match = WORD.match(self._text, self._at + length)
            assert match
            length = match.end() - self._at
            if match.end() < len(self._text) or (self._ended and self._is_whole):
                break
            yield from self.more()
        word = self._text[self._at : self._at + length]
        self._at += length
        return scalar_of_python(word)


def scalar_of_python(word: str) -> str:
    """Convert a Python number or constant to JSON. Raise NoMatch for any other text."""
    if SCALAR.fullmatch(word):
        return word
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    try:
        return str(int(word, 10 if word.lstrip("+-").isdigit() else 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError as error:
        raise NoMatch from error
    if not math.isfinite(number):
        raise NoMatch
    return json.dumps(number)


def json_of_python(text: str) -> str | None:
    """Convert a Python literal to JSON. Return None for any other text."""
    collector = _Collector(text)
    try:
        for _ in collector.literal():
            pass
    except (NoMatch, Ended):
        return None
    return "".join(collector.pieces) if collector.is_finished() else None


class _Collector(LiteralScanner):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.append(text)
        self.end(whole=True)

    def send_arguments(self, text: str) -> None:
        self.pieces.append(text)


def escaped(text: str) -> str:
    """Escape text for a JSON string. Unpaired surrogates are escaped too, because they cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]
