"""Parses calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json
import re
from abc import ABC
from typing import Any, ClassVar

from mindie_mm.tool_calls.json_arguments import without_control_characters
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.scanner import MAX_NAME, NoMatch, Step

_ARGUMENTS = ("arguments", "parameters")
_OTHER = ("id", "type")
_FIRST_KEYS = ('"name"', '"id"', '"type"')


class JsonCallParser(ToolCallParser, ABC):
    """A parser of calls such as `{"name": "f", "arguments": {"a": 1}}`.

    The keys may be in any order, and `parameters` is accepted for `arguments`. If the arguments are a string that
    contains JSON, the string is decoded. The last bracket may be missing.
    """

    tool_names = re.compile(".+", re.DOTALL)
    call_tags = ('{"name": {name}, "arguments": ', "}")
    after_opening: ClassVar[str] = ""
    """Text between an opening and its calls."""
    after_calls: ClassVar[tuple[str, ...]] = ()
    """Texts that may follow the calls after an opening. At most one of them follows."""

    @classmethod
    def tags_of(cls, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call, with the name as a JSON string."""
        return super().tags_of(json.dumps(name, ensure_ascii=False))

    @classmethod
    def written(cls, name: str, arguments: str) -> str | None:
        """Return a call as the model writes it."""
        before, after = cls.tags_of(name)
        return before + arguments + after

    def calls(self, opening: str) -> Step[None]:
        """Parse one call, a list of calls, or several calls after one opening."""
        yield from self.space()
        if self.after_opening:
            yield from self.expect(self.after_opening)
            yield from self.space()
        yield from (self.call_list() if opening.endswith("[") else self.call_objects())
        if self.after_calls:
            yield from self.close(*self.after_calls)

    def call_object(self, *, known_keys: bool = False) -> Step[None]:
        """Parse a call.

        Args:
            known_keys: Whether to raise NoMatch if the object has an unknown key, names an unknown tool or has no
                arguments.

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
                if not 0 < len(name) <= MAX_NAME or (known_keys and self.tools and name not in self.tools):
                    raise NoMatch
            elif key in _ARGUMENTS and not self.in_call and not held:
                held = yield from self._arguments(name)
            elif known_keys and key not in _OTHER:
                raise NoMatch
            else:
                yield from self.value()
            yield from self.space()
            if not (following := (yield from self.surely_follows(",", "}"))):
                if not self.in_call and not (name and held):
                    raise NoMatch
                break
            self._at += following == ","
        if not name or (known_keys and not self.in_call and not held):
            raise NoMatch
        if not self.in_call:
            self.start_call(name)
            self.send_arguments(held or "{}")
        self.end_call()

    def call_objects(self) -> Step[None]:
        """Parse a list of calls, or a call and the calls that follow it without an opening of their own."""
        if (yield from self.accept("[")):
            yield from self.call_list()
            return
        yield from self.call_object()
        while True:
            yield from self.space()
            yield from self.accept(",")
            yield from self.space()
            if not (yield from self.follows("{")):
                break
            try:
                yield from self.call_object()
            except NoMatch:
                if self.in_call:
                    raise
                break
        self._at = self._kept

    def call_list(self) -> Step[None]:
        """Parse a list of calls, after its opening bracket."""
        while True:
            yield from self.space()
            yield from self.call_object()
            yield from self.space()
            if (yield from self.expect(",", "]")) == "]":
                break
        self.taken()

    def _ends(self) -> Step[bool]:
        yield from self.space()
        return bool((yield from self.accept("}")))

    def _arguments(self, name: str) -> Step[str]:
        """Read arguments. If they are an object and the tool's name is known, send them. If not, return their JSON.

        An empty string and null stand for an empty object.
        """
        opening = yield from self.peek()
        if opening == "{" and name:
            self.start_call(name)
            yield from self.json_arguments(self.call_ends(), self._rest_follows)
            return ""
        if opening == '"':
            held = yield from self._text_of(self.string())
        else:
            held = yield from self.source(self.value())
        if held.strip() in ("", "null"):
            held = "{}"
        if not isinstance(_decoded(held), dict):
            raise NoMatch
        return without_control_characters(held)

    def _rest_follows(self) -> Step[bool]:
        """Read the text after the arguments of a call, and return whether it completes the call."""
        if (yield from self.rest_follows(self.call_ends())):
            return True
        if not (yield from self.accept("}")):
            return False
        yield from self.space()
        yield from self.accept(",", ";", "]")
        if (yield from self.rest_follows(self.call_ends())):
            return True
        if not (yield from self.accept("{")):
            return False
        yield from self.space()
        return bool((yield from self.surely_follows(*_FIRST_KEYS)))

    def _text_of(self, string: Step[None]) -> Step[str]:
        text = _decoded((yield from self.source(string)))
        assert isinstance(text, str)
        return text


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise NoMatch from error
