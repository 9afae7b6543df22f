"""Parses calls in which the values of arguments are raw text. The tool's schema determines the type of each value."""

from __future__ import annotations

import json
import re
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

from mindie_mm.structured.lark import Rules, json_value
from mindie_mm.tool_calls.literals import escaped, json_of_python
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.raw_strings import raw_string
from mindie_mm.tool_calls.scanner import Ended, Step
from mindie_mm.tool_calls.schemas import Tool, branches_of, properties_of, type_of, types_of

_NAMES = re.compile(r'[^\s<>"](?:[^<>"\n]*[^\s<>"])?')
"""Pattern of the argument names that all of these formats can represent."""
_CANDIDATE = re.compile(r"[\n<]")


class TypedTextParser(ToolCallParser, ABC):
    """A parser of calls in which tags surround the value of each argument.

    Strings are raw text, and are sent while they arrive. All other values are JSON or Python literals, and are sent
    when they are complete.
    """

    tags_of_argument: ClassVar[tuple[str, str]]
    """Texts before and after a value in the grammar. They may contain `{name}` and `{is_string}`."""
    excluded: ClassVar[tuple[str, ...]]
    """Texts that the grammar does not allow in a string."""

    @classmethod
    def arguments_rule(cls, tool: Tool, rules: Rules) -> str:
        """Return a sequence that matches the arguments in the order of the tool's schema."""
        arguments = []
        for name, (schema, is_required) in properties_of(tool, _NAMES).items():
            values = [cls._value(name, branch, schema, rules) for branch in branches_of(schema, f"{tool.name}.{name}")]
            rule = rules.add("argument", rules.one_of(values))
            arguments.append(rule if is_required else f"{rule}?")
        return " ".join(arguments)

    @classmethod
    def _value(cls, name: str, branch: Mapping[str, Any], schema: Mapping[str, Any], rules: Rules) -> str:
        is_string = branch.get("type") == "string"
        states_type = any("{is_string}" in tags for tags in cls.tags_of_argument)
        before, after = (
            tags.replace("{name}", name).replace("{is_string}", "true" if is_string else "false")
            for tags in cls.tags_of_argument
        )
        if is_string:
            others = frozenset[str]() if states_type else types_of(schema, schema) - {"string"}
            return f"{rules.text(before)} {raw_string(rules, branch, after, cls.excluded, others)}"
        return f"{rules.text(before)} {rules.add('json', json_value(branch))} {rules.text(after)}"

    def start_arguments(self, name: str) -> None:
        """Send the event for the start of a call."""
        self.start_call(name)
        tool = self.tools.get(name)
        self._schema = tool.schema if tool else {}
        self._seen: set[str] = set()

    def argument(self, name: str, ends: Callable[[], Step[bool]], *, is_string: bool | None = None) -> Step[None]:
        """Read the value of an argument and send it. If a name occurs several times, only the first value is sent.

        Args:
            name: Name of the argument.
            ends: Function that is called at each `<` or newline. If the value ends there, the function reads the text
                that ends it and returns True. The function does not raise NoMatch. It raises Ended if the answer ends
                within text that may end the value.
            is_string: Whether the value is a string. If it is None, the schema determines the type.

        """
        types = types_of(self._schema.get("properties", {}).get(name), self._schema)
        if is_string is not None:
            types = frozenset({"string"}) if is_string else types - {"string"}
        start = f"{', ' if self._seen else '{'}{json.dumps(name, ensure_ascii=False)}: "
        if name in self._seen:
            yield from self._text_until(ends)
        elif types == {"string"}:
            self.send_arguments(start + '"')
            self.taken()
            self._encode = escaped
            yield from self._text_until(ends)
            self._encode = None
            self.send_arguments('"')
        else:
            text = yield from self._text_until(ends)
            self.send_arguments(start + json_of(text, types))
        self._seen.add(name)
        self.taken()

    def finish_call(self) -> None:
        """Complete the current call with the arguments that were read."""
        self.end_arguments()

    def end_arguments(self) -> None:
        """Send the event for the end of a call."""
        self.send_arguments("}" if self._seen else "{}")
        self.end_call()

    def _text_until(self, ends: Callable[[], Step[bool]]) -> Step[str]:
        """Read a value and the text that ends it. Return the value, unless it has already been sent.

        If the model ends its answer within the value, the value ends there, too.
        """
        encode = self._encode
        start = self._at - self._kept
        while True:
            match = _CANDIDATE.search(self._text, self._at)
            self._at = match.start() if match else len(self._text)
            if encode:
                self.flush()
                start = 0
            stop = self._at - self._kept
            try:
                if not match:
                    yield from self.more()
                    continue
                self._encode = None  # the text that ends the value is not part of the value
                is_over = yield from ends()
            except Ended:
                if not self._is_whole:
                    raise
                self._at = len(self._text)
                is_over = True
            if is_over:
                return self._text[self._kept + start : self._kept + stop]
            self._encode = encode
            self._at = self._kept + stop + 1


def json_of(text: str, types: frozenset[str]) -> str:
    """Convert raw text to JSON for a schema that allows `types`. If `types` is empty, all types are allowed.

    If the text is JSON of an allowed type other than string, it is returned unchanged. If strings are not allowed, a
    Python literal is converted. In all other cases, the text becomes a JSON string.
    """
    stripped = text.strip()
    if _fits(stripped, types):
        return stripped
    if types and "string" not in types:
        literal = json_of_python(stripped)
        if literal is not None and _fits(literal, types):
            return literal
    return json.dumps(text, ensure_ascii=False)


def _fits(text: str, types: frozenset[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    if not types:
        return not isinstance(value, str)
    kind = type_of(value)
    return kind != "string" and (
        kind in types or (kind in {"integer", "number"} and bool({"integer", "number"} & types))
    )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
