"""What a caller's texts spell like control tokens: told apart from what is meant, while both are one string.

Before a prompt is put together, the first character of any such spelling is replaced by a private-use character that
occurs nowhere else. What spells a control token afterwards is meant; the rest is put back by `Rendered.restore`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

_FIRST_PRIVATE_USE = 0xE000


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as one string, control tokens spelled out."""

    text: str
    restore: Mapping[int, str]
    """From private-use characters to those that they stand for, for str.translate; empty where nothing was replaced."""
    items: Sequence[tuple[int, int]] = ()
    """Where in `text` each media item is spelled, [start, stop)."""


@dataclass(frozen=True, slots=True)
class Escapes:
    """The characters that are replaced in one prompt's texts, mostly none."""

    _spelling: re.Pattern[str]
    _replacements: Mapping[str, str]

    def apply(self, value: Any) -> Any:
        """`value`, which JSON could hold, with all of its strings escaped."""
        if not self._replacements:
            return value
        if isinstance(value, str):
            return self._spelling.sub(lambda match: self._replacements[match[0]], value)
        if isinstance(value, Mapping):
            return {self.apply(key): self.apply(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply(entry) for entry in value]
        return value

    def rendered(self, text: str) -> Rendered:
        """A prompt of what `apply` gave."""
        return Rendered(text, {ord(replacement): original for original, replacement in self._replacements.items()})


class ControlSpelling:
    """How a tokenizer's control tokens are spelled."""

    def __init__(self, control: Sequence[str]) -> None:
        """`control` are the tokens' texts, the longest first."""
        self._pattern = _pattern(control)

    def escapes(self, texts: Iterable[str], template: str = "") -> Escapes:
        """Replaces each character that begins a spelling in `texts` by one that neither they nor `template` have."""
        texts = list(texts)
        spelled = {match[0] for text in texts for match in self._pattern.finditer(text)}
        taken = set().union(*texts, template) if spelled else ()
        free = (chr(code) for code in count(_FIRST_PRIVATE_USE) if chr(code) not in taken)
        return Escapes(self._pattern, dict(zip(sorted(spelled), free, strict=False)))


def strings(value: Any) -> Iterator[str]:
    """All strings in a value that JSON could hold, keys too, in any order."""
    waiting = [value]  # one generator in another would take each string through all of them
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value


def _pattern(control: Sequence[str]) -> re.Pattern[str]:
    """Matches the first character of each control token in a text, and of what its end may begin.

    The latter, with any blanks behind it that a template may strip, would become a token if the template put the
    right text behind it.
    """
    prefixes = {token[:size] for token in control for size in range(1, len(token))}
    ends = "|".join(map(re.escape, sorted(prefixes, key=len, reverse=True)))
    tokens = "|".join(map(re.escape, control))
    first = "".join({re.escape(token[0]) for token in control})
    return re.compile(rf"(?=(?:{tokens})|(?:{ends or '(?!)'})\s*\Z)[{first}]")
