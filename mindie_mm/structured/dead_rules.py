"""Removes the parts of a Lark grammar that no text can match, so that the model never begins such a part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mindie_mm.errors import InputError

NO_OUTPUT = "no output can match it"
_LINE = re.compile(r"([A-Za-z_]\w*): (.+)")
_TOKEN = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[imslux]*|<\[[^\]]*\]>|@\w+)|(?P<name>[A-Za-z_]\w*)|'
    r"(?P<schema>%json +)|(?P<mark>[()|])|(?P<repeat>[?*+]|\{\d*,?\d*\})|\s+"
)
_RULE = re.compile(r"[?!]?([A-Za-z_]\w*)(?:\[[^\]]*\])?(?:\.\d+)?\s*:")
_IMPORT = re.compile(r"%import[\w. ]*?(\w+)\s*$")
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|((?://|#)[^\n]*)')
"""Pattern of a literal, a regular expression or, as its group, a comment."""
_OPTIONAL = re.compile(r"[?*]|\{0?,")
_decoder = json.JSONDecoder()


def without_dead_parts(grammar: str, limits: LLParserLimits, *, schemas: bool) -> str:
    """Return a grammar without the alternatives and optional parts that no text can match.

    Only grammars with one rule per line are changed, as the grammars of tool calls are.

    Args:
        grammar: Grammar in llguidance's Lark syntax.
        limits: Limits for compiling a part of the grammar.
        schemas: Whether to check each JSON schema, too. Otherwise, only terminals with `&` are checked.

    Raises:
        InputError: No text can match the grammar.

    """
    matches = [_LINE.fullmatch(line) for line in grammar.splitlines()]
    rules = {match[1]: match[2] for match in matches if match}
    if len(rules) != len(matches) or "start" not in rules:
        return grammar
    terminals = {name: body for name, body in rules.items() if name.isupper()}
    if not schemas and not any(" & " in body for body in terminals.values()):
        return grammar
    try:
        return _pruned(rules, terminals, _Emptiness(terminals, limits, schemas=schemas))
    except _Unknown:
        return grammar


class _Unknown(Exception):
    """A rule has syntax that this module does not read."""


class _Emptiness:
    """Tells which terminals and schemas match no text."""

    def __init__(self, terminals: Mapping[str, str], limits: LLParserLimits, *, schemas: bool) -> None:
        self._lines = "".join(f"{name}: {body}\n" for name, body in terminals.items())
        self._limits = limits
        self._checks_schemas = schemas
        self._vocabulary = LLTokenizer("byte")
        self._known: dict[str, bool] = {}

    def __call__(self, part: str) -> bool:
        if part.startswith("%") and not self._checks_schemas:
            return False
        if part not in self._known:
            grammar = f"start: {part}\n{'' if part.startswith('%') else self._lines}"
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_logit_bias()
            self._known[part] = matcher.is_error() and matches_nothing(matcher.get_error())
        return self._known[part]


def refuse_endless(grammar: str) -> None:
    """Raise InputError if a Lark grammar matches no finite text, because its rules require themselves.

    llguidance accepts such a grammar. A grammar with syntax that this module does not read is not checked.
    """
    rules: dict[str, str] = {}
    name, defined = "", set[str]()
    for line in _COMMENT.sub(lambda match: "" if match[1] else match[0], grammar).splitlines():
        if match := _RULE.match(line):
            name = match[1]
            rules[name] = line[match.end() :]
        elif match := _IMPORT.match(line):
            defined.add(match[1])
        elif name and not line.lstrip().startswith("%"):
            rules[name] += line
    with suppress(_Unknown, RecursionError, ValueError):
        parsed = {name: list(_tokens(body)) for name, body in rules.items() if not name.isupper()}
        used = {text for tokens in parsed.values() for kind, text in tokens if kind == "name"}
        if "start" in parsed and "start" not in _matched(parsed, (used | defined) - parsed.keys(), lambda _: False):
            raise InputError(f"the grammar is not supported: {NO_OUTPUT}, because its rules never end")


def _matched(
    rules: Mapping[str, list[tuple[str, str]]], alive: Collection[str], is_empty: Callable[[str], bool]
) -> set[str]:
    """Return `alive`, and the names of all rules that some text can match if texts can match the rules in `alive`."""
    found, left = {*alive}, list(rules)
    while True:
        num_before = len(found)
        left = [name for name in reversed(left) if name not in found]  # chains of rules have either order
        found.update(name for name in left if _Reader(rules[name], found, is_empty).whole() is not None)
        if len(found) == num_before:
            return found


def matches_nothing(error: str) -> bool:
    """Return whether an error of llguidance says that no text matches."""
    return "Unsatisfiable" in error or "NoExtension" in error


def _pruned(rules: Mapping[str, str], terminals: Mapping[str, str], is_empty: Callable[[str], bool]) -> str:
    parsed = {name: list(_tokens(body)) for name, body in rules.items() if name not in terminals}
    alive = _matched(parsed, [name for name in terminals if not is_empty(name)], is_empty)
    written = {name: _Reader(tokens, alive, is_empty).whole() for name, tokens in parsed.items()}
    if "start" not in alive:
        raise InputError(f"the grammar is not supported: {NO_OUTPUT}")
    lines = [f"{name}: {terminals.get(name) or written[name]}" for name in rules if name in alive]
    return "".join(f"{line}\n" for line in lines)


def _tokens(body: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each token of a rule."""
    at = 0
    while at < len(body):
        match = _TOKEN.match(body, at)
        if not match:
            raise _Unknown
        at = match.end()
        if match.lastgroup == "schema":
            start = at
            _, at = _decoder.raw_decode(body, at)
            yield "schema", f"%json {body[start:at]}"
        elif match.lastgroup:
            yield match.lastgroup, match[0]


class _Reader:
    """Reads a rule, and writes it again without its dead parts."""

    def __init__(self, tokens: list[tuple[str, str]], alive: Collection[str], is_empty: Callable[[str], bool]) -> None:
        self._tokens = [*tokens, ("mark", "")]
        self._at = 0
        self._alive = alive
        self._is_empty = is_empty

    def whole(self) -> str | None:
        """Return the rule, or None if no text matches it."""
        body = self._alternatives()
        if self._tokens[self._at] != ("mark", "") or self._at + 1 < len(self._tokens):
            raise _Unknown
        return body

    def _alternatives(self) -> str | None:
        alternatives = [self._sequence()]
        while self._tokens[self._at][1] == "|":
            self._at += 1
            alternatives.append(self._sequence())
        alive = [text for text in alternatives if text is not None]
        return " | ".join(alive) if alive else None

    def _sequence(self) -> str | None:
        items: list[str] = []
        is_alive = True
        while self._tokens[self._at][1] not in ("|", ")", ""):
            item = self._item()
            kind, repeat = self._tokens[self._at]
            if kind == "repeat":
                self._at += 1
                if item is None and _OPTIONAL.match(repeat):
                    continue
                item = item and item + repeat
            is_alive &= item is not None
            items.append(item or "")
        return (" ".join(items) or '""') if is_alive else None

    def _item(self) -> str | None:
        kind, text = self._tokens[self._at]
        self._at += 1
        if text == "(":
            inner = self._alternatives()
            if self._tokens[self._at][1] != ")":
                raise _Unknown
            self._at += 1
            return inner and f"({inner})"
        if kind == "name":
            return text if text in self._alive else None
        if kind == "schema":
            return None if self._is_empty(text) else text
        if kind != "text":
            raise _Unknown
        return text
