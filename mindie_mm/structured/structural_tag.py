"""Translates structural tags, in the formats of xgrammar and of older vLLM, into llguidance's Lark syntax.

Adjacent parts that are regular expressions are merged into one terminal, because a terminal matches as much text as
possible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.structured import lark
from mindie_mm.structured.gbnf import is_gbnf, lark_of_gbnf

_MAX_DEPTH = 32
_MAX_REPEATS = 1000


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    regular: bool = False
    """True if the part may be used in a terminal as well as in a rule."""
    open: bool = False
    """True if the part may end with text of any length, which could also match the text of the next part."""
    letters: str = ""
    """The same part with one terminal per character, for use in a rule. Empty unless the part is a fixed text."""


@dataclass(slots=True)
class TagWriter:
    """Writes the Lark grammar of one structural tag."""

    tokens: Mapping[str, int]
    """Text and id of each added token that decoded text shows."""
    lines: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)
    """Further Lark grammars that the rules refer to."""

    def write(self, text: str) -> list[dict[str, Any]]:
        """Translate a structural tag in JSON to llguidance's list of grammars.

        Raises:
            InputError: The tag is not valid, or contains a format that is not supported.

        """
        try:
            given = json.loads(text)
        except RecursionError as error:
            raise InputError("the structural tag is nested too deeply") from error
        except ValueError as error:
            raise InputError(f"the structural tag is not valid JSON: {error}") from error
        if not isinstance(given, dict):
            raise InputError("the structural tag is not a JSON object")
        if "structures" in given:
            given = {"format": _of_structures(given)}
        whole = self._part(_member(given, "format", dict), last=True)
        start = f"start: {self._rule_text(whole)}"
        return [{"name": "tags", "lark_grammar": "\n".join([start, *self.lines])}, *self.grammars]

    def _part(self, given: Mapping[str, Any], depth: int = 0, *, last: bool = False) -> _Part:
        """Return the part for a format. `last` says that no other part follows."""
        if depth > _MAX_DEPTH:
            raise InputError(f"the structural tag nests formats deeper than the limit of {_MAX_DEPTH}")
        kind = _member(given, "type", str)
        return self._primitive(given, kind) or self._composed(given, kind, depth, last=last)

    def _composed(self, given: Mapping[str, Any], kind: str, depth: int, *, last: bool) -> _Part:
        """Return the part for a format that contains other formats."""
        match kind:
            case "sequence":
                *before, end = _formats(given, "elements")
                parts = [self._part(one, depth + 1) for one in before]
                return self._sequence([*parts, self._part(end, depth + 1, last=last)])
            case "or":
                elements = _formats(given, "elements")
                return self._any_of([self._part(one, depth + 1, last=last) for one in elements])
            case "optional" | "plus" | "star" | "repeat":
                return self._repeated(kind, given, depth)
            case "tag":
                return self._tag(given, depth)
            case "triggered_tags":
                return self._triggered(given, depth, last=last)
            case "tags_with_separator":
                return self._separated(given, depth)
            case _:
                raise InputError(f"the structural tag has a format of type {kind!r:.40}, which is not supported")

    def _primitive(self, given: Mapping[str, Any], kind: str) -> _Part | None:
        """Return the part for a format that does not contain other formats, or None."""
        match kind:
            case "const_string":
                return self._literal(_member(given, "value", str))
            case "json_schema" | "qwen_xml_parameter":
                return self._json(given, kind)
            case "regex":
                return _Part(lark.regex(_member(given, "pattern", str)), regular=True, open=True)
            case "any_text":
                return _Part(self._any_text(given), regular=True, open=True)
            case "grammar":
                return self._grammar(_member(given, "grammar", str))
        return None

    def _json(self, given: Mapping[str, Any], kind: str) -> _Part:
        style = given.get("style", "json")
        if kind != "json_schema" or style != "json" or given.get("any_order"):
            raise InputError("the structural tag has a json_schema with style or any_order, which are not supported")
        return _Part(f"%json {json.dumps(lark.schema(json.dumps(_member(given, 'json_schema', (dict, bool)))))}")

    def _literal(self, text: str) -> _Part:
        """Return a part that matches `text`. The model may write an added token in `text` as one token or spell it."""
        letters = " ".join(map(lark.literal, text)) or '""'
        pieces = [_Part(lark.literal(text), regular=True, letters=letters)]
        for name, token_id in self.tokens.items():
            if name == text:
                return _Part(f"({lark.token(token_id)} | {lark.literal(text)})")
            if name in text:
                before, _, after = text.partition(name)
                pieces = [self._literal(one) for one in (before, name, after) if one]
                break
        return self._sequence(pieces)

    def _grammar(self, text: str) -> _Part:
        number = len(self.lines) + len(self.grammars)
        if is_gbnf(text):
            name = f"g{number}"
            self.lines.append(lark_of_gbnf(text, name, whole=False))
            return _Part(name, open=True)
        name = f"grammar{number}"
        self.grammars.append({"name": name, "lark_grammar": lark.with_exact_schemas(text)})
        return _Part(f"@{name}", open=True)

    def _any_text(self, given: Mapping[str, Any]) -> str:
        for limit in ("max_tokens", "max_chars"):
            if given.get(limit) is not None:
                raise InputError(f"the structural tag has the key {limit}, which is not supported; remove this key")
        if not (excluded := _texts(given, "excludes", empty=True)):
            return lark.TEXT
        return f"({lark.TEXT} & ~({lark.TEXT} ({lark.any_of(excluded)}) {lark.TEXT}))"

    def _sequence(self, parts: Sequence[_Part]) -> _Part:
        """Return a part that matches `parts` in sequence. Adjacent regular parts are merged into one terminal."""
        merged: list[_Part] = []
        for part in parts:
            if part.regular and merged and merged[-1].regular:
                merged[-1] = _Part(f"{merged[-1].text} {part.text}", regular=True, open=part.open)
                continue
            if merged and merged[-1].open and (merged[-1].regular or not part.letters):
                raise InputError(
                    "the structural tag has a format of any length before another format; put a const_string "
                    "between them"
                )
            merged.append(part)
        if len(merged) == 1:
            return merged[0]
        return _Part(" ".join(map(self._rule_text, merged)) or '""', regular=not merged)

    def _any_of(self, parts: Sequence[_Part]) -> _Part:
        regular = all(part.regular for part in parts)
        texts = [part.text if regular else self._rule_text(part) for part in parts]
        return _Part(f"({' | '.join(texts)})", regular=regular, open=any(part.open for part in parts))

    def _repeated(self, kind: str, given: Mapping[str, Any], depth: int) -> _Part:
        part = self._part(_member(given, "content", dict), depth + 1)
        sign = {"optional": "{0,1}", "plus": "{1,}", "star": "{0,}"}.get(kind)
        if sign is None:
            least, most = _member(given, "min", int), _member(given, "max", int)
            if not 0 <= least <= _MAX_REPEATS or not (most == -1 or max(least, 1) <= most <= _MAX_REPEATS):
                raise InputError(
                    f"the structural tag has a repeat with min {least!r:.40} and max {most!r:.40}; max must be -1, or "
                    f"at least 1 and not below min; the limit for both is {_MAX_REPEATS}"
                )
            sign = f"{{{least},{'' if most == -1 else most}}}"
        text = part.text if part.regular else self._rule_text(part)
        return _Part(f"({text}){sign}", regular=part.regular, open=part.regular)

    def _tag(self, given: Mapping[str, Any], depth: int, skipped: str = "") -> _Part:
        """Return the part for a tag, without the text `skipped` at its beginning."""
        begin, content = _member(given, "begin", str), _member(given, "content", dict)
        ends = [given["end"]] if isinstance(given.get("end"), str) else _texts(given, "end")
        opening = self._literal(begin.removeprefix(skipped))
        if content.get("type") == "any_text" and all(ends):
            return self._sequence([opening, self._up_to(self._any_text(content), ends)])
        closing = self._any_of([self._literal(end) for end in ends])
        inner = self._sequence([opening, self._part(content, depth + 1)])
        return self._sequence([replace(inner, open=False), closing])  # the end text shows where the content ends

    def _up_to(self, text: str, ends: Sequence[str]) -> _Part:
        """Return a part that matches `text` up to and including the first of `ends`."""
        name = self._added(f"{text} ({lark.any_of(ends)})", "[lazy]")
        end_tokens = [lark.token(self.tokens[end]) for end in ends if end in self.tokens]
        if not end_tokens:
            return _Part(name)
        return _Part(f"({name} | {self._rule_text(_Part(text, regular=True))} ({' | '.join(end_tokens)}))")

    def _triggered(self, given: Mapping[str, Any], depth: int, *, last: bool) -> _Part:
        """Return a part that matches free text in which each trigger begins a tag."""
        if not last:
            raise InputError("the structural tag has triggered_tags before another format; this order is not supported")
        text = self._any_text({"excludes": given.get("excludes")})
        triggers, tags = _texts(given, "triggers"), _formats(given, "tags")
        triggered: list[str] = []
        for tag in tags:
            begin = _member(tag, "begin", str)
            if (trigger := next((one for one in triggers if begin.startswith(one)), None)) is None:
                raise InputError(
                    f"the structural tag has a tag with begin {begin!r:.40}, which starts with none of the triggers"
                )
            heads = self._up_to(text, [trigger])
            triggered.append(self._rule_text(self._sequence([heads, self._tag(tag, depth + 1, trigger)])))
        unused = [one for one in triggers if not any(tag["begin"].startswith(one) for tag in tags)]
        if unused:
            raise InputError(f"the structural tag has the trigger {unused[0]!r:.40}, but no tag begins with it")
        any_tag, rest = f"({' | '.join(triggered)})", self._rule_text(_Part(text, regular=True))
        more = "" if given.get("stop_after_first") else f"{any_tag}{{0,}} {rest}"
        if given.get("at_least_one"):
            first = self._any_of([self._tag(tag, depth + 1) for tag in tags])
            return _Part(f"{self._rule_text(first)} {more}")
        return _Part(more or f"({any_tag} | {rest})")

    def _separated(self, given: Mapping[str, Any], depth: int) -> _Part:
        tag = self._rule_text(self._any_of([self._tag(one, depth + 1) for one in _formats(given, "tags")]))
        separator = self._rule_text(self._literal(_member(given, "separator", str)))
        text = tag if given.get("stop_after_first") else f"{tag} ({separator} {tag}){{0,}}"
        return _Part(f"({text})" if given.get("at_least_one") else f"({text}){{0,1}}")

    def _rule_text(self, part: _Part) -> str:
        """Return the text that represents a part in a rule. A regular part without letters becomes a terminal."""
        if part.letters:
            return f"({part.letters})"
        return self._added(part.text, "", terminal=True) if part.regular else part.text

    def _added(self, text: str, attributes: str, *, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {text}")
        return name


def _of_structures(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert vLLM's older format, in which tags are called structures."""
    tags = [
        {
            "type": "tag",
            "begin": _member(one, "begin", str),
            "content": {"type": "json_schema", "json_schema": {} if one.get("schema") is None else one["schema"]},
            "end": _member(one, "end", str),
        }
        for one in _formats(given, "structures")
    ]
    return {"type": "triggered_tags", "triggers": _texts(given, "triggers"), "tags": tags}


def _member(given: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = given.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(
            f"the structural tag has {name} {value!r:.40}, which is not valid; see docs/structured-outputs.md"
        )
    return value


def _formats(given: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = _member(given, name, list)
    if not values or not all(isinstance(one, dict) for one in values):
        raise InputError(f"{name} in the structural tag must be a list of at least one object")
    return list(values)


def _texts(given: Mapping[str, Any], name: str, *, empty: bool = False) -> list[str]:
    values = given.get(name)
    if empty and not values:
        return []
    if not isinstance(values, list) or not values or not all(isinstance(one, str) and one for one in values):
        raise InputError(f"{name} in the structural tag must be a list of at least one non-empty string")
    return list(values)
