"""A scanner of text that arrives in pieces. All parsers are based on this scanner."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns a `T`."""

MAX_NAME = 256
"""Maximum number of characters of a name. This also limits how much text is held back."""

NAME = re.compile(r"[\w.:/-]+")
_SPACE = re.compile(r"[ \t\r\n]*")
_NO_QUOTE = re.compile(r'[^"\\]*')
WORD = re.compile(r"[-+.\w]*")
SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")


class NoMatch(Exception):
    """The text does not match the grammar."""


class Ended(Exception):
    """The text ended, but the grammar requires more text."""


class Scanner:
    """A string that grows by pieces, and the position up to which it has been read.

    Methods that return a `Step` wait until there is enough text for a decision. Their results therefore do not depend
    on the pieces in which the text arrives. These methods raise NoMatch if the text does not match, and Ended if the
    text ends too early.
    """

    def __init__(self) -> None:
        """Create a scanner without text."""
        self._text = ""
        self._at = 0
        """Position of the next character to read."""
        self._kept = 0
        """Position of the first character that is still needed."""
        self._ended = False
        self._is_whole = False
        """True if the model ended the text itself."""
        self.is_cut = False
        """True if the text ended with the beginning of an expected literal."""
        self._accepted = ""
        """Literal that was accepted last."""

    def append(self, text: str) -> None:
        """Append a piece of text."""
        self._text = self._text[self._kept :] + text
        self._at -= self._kept
        self._kept = 0

    def end(self, *, whole: bool = False) -> None:
        """Record that the text is complete. `whole` says whether the model ended it, so that nothing was cut off."""
        self._ended = True
        self._is_whole = whole

    def is_finished(self) -> bool:
        """Return whether the text is complete and was read to the end."""
        return self._ended and self._at == len(self._text)

    def taken(self) -> str:
        """Return the text that was read since the last call to this method. The text is then no longer kept."""
        text = self._text[self._kept : self._at]
        self._kept = self._at
        return text

    def more(self) -> Step[None]:
        """Wait for more text."""
        if self._ended:
            raise Ended
        yield

    def peek(self, length: int = 1) -> Step[str]:
        """Return the next `length` characters without reading them."""
        while len(self._text) - self._at < length:
            yield from self.more()
        return self._text[self._at : self._at + length]

    def follows(self, *literals: str) -> Step[str]:
        """Return the first of `literals` that the unread text starts with, or "" if there is none. Read nothing."""
        while True:
            undecided = False
            for literal in literals:
                if self._text.startswith(literal, self._at):
                    return literal
                if self._may_become(literal):
                    if not self._ended:
                        undecided = True
                        break
                    self.is_cut = True
            if not undecided:
                return ""
            yield from self.more()

    def surely_follows(self, *literals: str) -> Step[str]:
        """Return the same as `follows`. Raise Ended if the text ends with the beginning of one of the literals."""
        self.is_cut = False
        literal = yield from self.follows(*literals)
        if self.is_cut:
            raise Ended
        return literal

    def surely_accept(self, *literals: str) -> Step[str]:
        """Read and return the same as `surely_follows`."""
        literal = yield from self.surely_follows(*literals)
        self._at += len(literal)
        return literal

    def accept(self, *literals: str) -> Step[str]:
        """Read and return the first of `literals` that the unread text starts with. If there is none, return ""."""
        literal = yield from self.follows(*literals)
        self._at += len(literal)
        self._accepted = literal or self._accepted
        return literal

    def expect(self, *literals: str) -> Step[str]:
        """Read and return one of the literals. Raise NoMatch if none follows."""
        literal = yield from self.accept(*literals)
        if not literal:
            raise Ended if self.is_cut else NoMatch
        return literal

    def _may_become(self, literal: str) -> bool:
        """Return whether the unread text is the beginning of `literal`."""
        rest = len(self._text) - self._at
        return rest < len(literal) and literal.startswith(self._text[self._at :])

    def space(self) -> Step[None]:
        """Read whitespace, if any."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match
            self._at = match.end()
            if self._at < len(self._text) or self._ended:
                return
            yield from self.more()

    def at_end(self) -> Step[bool]:
        """Return whether there is no more text."""
        while self._at == len(self._text) and not self._ended:
            yield from self.more()
        return self._at == len(self._text)

    def surely_at_end(self) -> Step[bool]:
        """Return whether the model ended the text here. Raise Ended if the text was cut off here."""
        is_end = yield from self.at_end()
        if is_end and not self._is_whole:
            raise Ended
        return is_end

    def name(self) -> Step[str]:
        """Read the name of a tool. A name does not contain whitespace, quotes or brackets."""
        length = 0
        while True:
            if match := NAME.match(self._text, self._at + length):
                length = match.end() - self._at
            if length > MAX_NAME:
                raise NoMatch
            if self._at + length < len(self._text):
                break
            yield from self.more()
        if not length:
            raise NoMatch
        self._at += length
        return self._text[self._at - length : self._at]

    def until(self, *literals: str, at_most: int = MAX_NAME) -> Step[str]:
        """Read the text before the next of the literals and return the text. Do not read the literal itself."""
        searched, longest = 0, max(map(len, literals))
        while True:
            match = pattern(literals).search(self._text, self._at + searched)
            length = match.start() - self._at if match else len(self._text) - self._at - longest
            if length > at_most:
                raise NoMatch
            if match:
                text = self._text[self._at : match.start()]
                self._at = match.start()
                return text
            searched = max(0, length)
            yield from self.more()

    def source(self, step: Step[None]) -> Step[str]:
        """Run `step` and return the text that it reads."""
        start = self._at - self._kept
        yield from step
        return self._text[self._kept + start : self._at]

    def string(self) -> Step[None]:
        """Read a JSON string. Control characters and unknown escapes are allowed."""
        yield from self.expect('"')
        while True:
            match = _NO_QUOTE.match(self._text, self._at)
            assert match
            self._at = match.end()
            following = yield from self.peek()
            if following == '"':
                self._at += 1
                return
            if following == "\\":
                yield from self.peek(2)
                self._at += 2

    def sent_until(self, literals: tuple[str, ...], send: Callable[[int], None]) -> Step[tuple[str, int]]:
        """Send the text before the next of the literals, and read this literal.

        Whitespace before the literal is kept and not sent.

        Args:
            literals: Texts to look for.
            send: Function that sends the text before a position. The text is then no longer kept.

        Returns:
            The literal, or "" if the text ends without a literal; and the number of whitespace characters kept.

        """
        num_spaces = 0
        while True:
            self._at = self._kept + num_spaces
            match = pattern(literals).search(self._text, self._at)
            stop = match.start() if match else len(self._text) - partial(self._text, self._at, literals)
            if text := self._text[self._at : stop].rstrip(" \t\r\n"):
                send(self._at + len(text))
            num_spaces = stop - self._kept
            if match:
                self._at = match.end()
                return match[0], num_spaces
            if self._ended:
                return "", num_spaces
            yield from self.more()

    def value(self) -> Step[None]:
        """Read a JSON value. Nested values do not cause recursion."""
        closing: list[str] = []
        while True:
            if opening := (yield from self.accept("{", "[")):
                yield from self.space()
                closing.append("}" if opening == "{" else "]")
                if not (yield from self.accept(closing[-1])):
                    yield from self._key(closing)
                    continue
                closing.pop()
            elif (yield from self.follows('"')):
                yield from self.string()
            else:
                yield from self._scalar()
            while closing:
                yield from self.space()
                if (yield from self.expect(",", closing[-1])) == ",":
                    yield from self.space()
                    yield from self._key(closing)
                    break
                closing.pop()
            else:
                return

    def _key(self, closing: list[str]) -> Step[None]:
        if closing[-1] == "}":
            yield from self.string()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()

    def _scalar(self) -> Step[None]:
        word = ""
        while True:
            match = WORD.match(self._text, self._at)
            assert match
            word += match[0]
            self._at = match.end()
            if self._at < len(self._text):
                break
            yield from self.more()
        if not SCALAR.fullmatch(word):
            raise NoMatch


@cache
def pattern(literals: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches any of the literals."""
    return re.compile("|".join(map(re.escape, literals)))


def partial(text: str, start: int, literals: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text`, after `start`, that is the beginning of a literal."""
    for length in range(min(len(text) - start, max(map(len, literals)) - 1), 0, -1):
        if any(literal.startswith(text[-length:]) for literal in literals):
            return length
    return 0
