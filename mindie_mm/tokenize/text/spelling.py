"""Escaping of control tokens in a user's text, so that they differ from intended control tokens.

Before a prompt is assembled, the first character of each control token that a user's text spells is replaced with a
private-use character that occurs nowhere else. Every control token that is left in the prompt is intended.
`Rendered.restore` contains the original characters.

The escapes work with a template that writes each of the user's strings unchanged, or without surrounding whitespace.
Other templates can still produce a control token from a user's text. They may split a string and join the pieces, or
change its letters. They may also write the beginning of a token and then a value that is not escaped. Such a value is a
number, or a string that is also a name in the template, such as "object".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from mindie_mm.errors import InputError

_FREE = range(0xE000, 0x110000)
"""Code points of replacement characters, beginning with private-use characters."""
_FIELDS = re.compile("[%{]")
"""Characters that may begin a field in a template's format string."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as one string, including the texts of control tokens."""

    text: str
    restore: Mapping[int, str]
    """Map from private-use characters to the characters that they replaced, for str.translate. It is empty for most
    prompts."""
    items: Sequence[tuple[int, int]] = ()
    """Range [start, stop) of each media item in `text`."""
    embeds_mark: str = ""
    """Character that marks each item of text embeddings in `text`, or "" if these items have the usual marker. Because
    a template treats the character as text, it may write the item before or after media."""
    has_control_text: bool = False
    """True if a user's text may contain control tokens, except those of media items."""


@dataclass(frozen=True, slots=True)
class Escapes:
    """The replacements of characters in the texts of one prompt. Most prompts do not have replacements."""

    _spelling: ControlSpelling
    _replacements: Mapping[str, str]

    def apply(self, value: Any) -> Any:
        """Escape all strings in a JSON value."""
        if not self._replacements:
            return value
        if isinstance(value, str):
            characters = list(value)
            for at in self._spelling.places(value):
                characters[at] = self._replacements[value[at]]
            return "".join(characters)
        if isinstance(value, Mapping):
            return {self.apply(key): self.apply(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply(entry) for entry in value]
        return value

    def rendered(self, text: str) -> Rendered:
        """Create the prompt from `text`, which was rendered from escaped values."""
        return Rendered(text, {ord(replacement): original for original, replacement in self._replacements.items()})


def unused_character(texts: Sequence[str]) -> str:
    """Return a private-use character that does not occur in the texts. Raise InputError if all characters occur."""
    taken = set().union(*texts)
    for character in map(chr, reversed(_FREE)):
        if character not in taken:
            return character
    raise InputError(f"the texts use all {len(_FREE)} characters from U+{_FREE[0]:X} on; at least one must be unused")


class ControlSpelling:
    """Detection and escaping of texts that spell a tokenizer's control tokens."""

    def __init__(self, control: Sequence[str], words: Collection[str] = ()) -> None:
        """Prepare the search for spellings.

        If a text in `words` ends with the beginning of a token, a user's text that could complete a token is escaped,
        too. Hardly any template has such a text. The user's text is not escaped if it is a name in `words`, because the
        template may look for this name.

        Args:
            control: Texts of the control tokens, the longest first.
            words: Texts that the template writes or looks for.

        """
        beginnings = {token[:size] for token in control for size in range(1, len(token))}
        self._pattern = _pattern(control, beginnings)
        self._names = frozenset(filter(str.isidentifier, words))
        written = (piece.rstrip() for word in words for piece in _FIELDS.split(word))
        begins = any(piece.endswith(tuple(beginnings)) for piece in written)
        rests = {token[size:].lstrip() for token in control for size in range(1, len(token))} - {""}
        self._rests = tuple(rests) if begins else ()
        self._control = "\n".join(control)

    def escapes(self, texts: Iterable[str], template: str = "") -> Escapes:
        """Return replacements for all characters that begin a spelling in `texts`.

        The replacements occur neither in `texts` nor in `template`. Raise InputError if no unused characters are left.
        """
        texts = list(texts)
        spelled = sorted({text[at] for text in texts for at in self.places(text)})
        taken = set().union(*texts, template) if spelled else ()
        free = (character for character in map(chr, _FREE) if character not in taken)
        replacements = dict(zip(spelled, free, strict=False))
        if len(replacements) < len(spelled):
            raise InputError(
                f"the texts use all {len(_FREE)} characters from U+{_FREE[0]:X} on; at least one must be unused"
            )
        return Escapes(self, replacements)

    def places(self, text: str) -> Iterator[int]:
        """Yield the offsets of the characters to replace in a user's `text`. An offset may occur twice."""
        yield from (match.start() for match in self._pattern.finditer(text))
        if self._rests and text not in self._names and self._goes_on(text.strip()):
            yield len(text) - len(text.lstrip())

    def _goes_on(self, text: str) -> bool:
        """Return whether `text` could complete a control token: it begins with the end of one, or is a part of one."""
        return text != "" and (text.startswith(self._rests) or text in self._control)


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, including keys, in any order. Raise InputError for other values."""
    waiting = [value]  # a stack, because nested generators would pass each string through every level
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif not isinstance(value, (int, float, NoneType)):  # a template could write any other value as text, unescaped
            raise InputError(f"chat template variables must be JSON values, not {type(value).__name__}")


def _pattern(control: Sequence[str], beginnings: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for the first character of a control token, and of an incomplete token at the end of the text.

    An incomplete token would become a token if the template appended the rest. Whitespace may follow the incomplete
    token, because a template may strip whitespace.
    """
    ends = "|".join(map(re.escape, sorted(sorted(beginnings), key=len, reverse=True)))
    tokens = "|".join(map(re.escape, control))
    first = "".join(sorted({re.escape(token[0]) for token in control}))
    return re.compile(rf"(?=(?:{tokens})|(?:{ends or '(?!)'})\s*\Z)[{first}]")
