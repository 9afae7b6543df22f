"""The formats of DeepSeek-V3.2 and later, which write calls in a markup language called DSML."""

from __future__ import annotations

import re
from abc import ABC
from typing import ClassVar

from mindie_mm.tool_calls.scanner import NoMatch, Step
from mindie_mm.tool_calls.typed_text import TypedTextParser

_ATTRIBUTE = re.compile(r'\s*([a-z]+)="([^"]*)"')


class DsmlParser(TypedTextParser, ABC):
    """A parser of calls in DSML.

    A call is an element `invoke` that contains one element `parameter` per argument: `<｜DSML｜parameter name="a"
    string="false">1</｜DSML｜parameter>`. The attribute `string` is true if the value is raw text, and false if it is
    JSON. The name of the element around the calls depends on the version.
    """

    section: ClassVar[str]
    """Name of the element around the calls."""
    prefix: ClassVar[str] = "｜DSML｜"
    markers = ("｜DSML｜",)

    def __init_subclass__(cls) -> None:
        """Derive the tags of a subclass from its `section` and `prefix`."""
        super().__init_subclass__()
        cls.in_templates = (f"{cls.prefix}{cls.section}",)
        cls.openings = (f"<{cls.prefix}{cls.section}>",)
        cls.closings = (f"</{cls.prefix}{cls.section}>",)
        cls.around = (f"{cls.openings[0]}\n", "", cls.closings[0])
        cls.call_tags = (f'<{cls.prefix}invoke name="{{name}}">\n', f"</{cls.prefix}invoke>\n")
        cls.excluded = (f"</{cls.prefix}parameter>",)
        cls.tags_of_argument = (
            f'<{cls.prefix}parameter name="{{name}}" string="{{is_string}}">',
            f"</{cls.prefix}parameter>\n",
        )

    def calls(self, opening: str) -> Step[None]:
        """Parse the calls of a section."""
        yield from self.space()
        while (yield from self.expect(f"<{self.prefix}invoke ", *self.closings)) not in self.closings:
            attributes = yield from self._attributes("/>", ">")
            self.start_arguments(attributes["name"])
            if (yield from self.accept(">")):
                yield from self._parameters()
            else:
                yield from self.expect("/>")
            self.end_arguments()
            yield from self.space()
        self.taken()

    def _parameters(self) -> Step[None]:
        yield from self.space()
        closing = f"</{self.prefix}invoke>"
        while (yield from self.expect(f"<{self.prefix}parameter ", closing)) != closing:
            attributes = yield from self._attributes(">")
            yield from self.expect(">")
            is_string = {"true": True, "false": False}.get(attributes.get("string", ""))
            yield from self.argument(attributes["name"], self._value_ends, is_string=is_string)
            yield from self.space()

    def _attributes(self, *ends: str) -> Step[dict[str, str]]:
        attributes = dict(_ATTRIBUTE.findall((yield from self.until(*ends))))
        if not attributes.get("name"):
            raise NoMatch
        return attributes

    def _value_ends(self) -> Step[bool]:
        return bool((yield from self.surely_accept(f"</{self.prefix}parameter>")))


class DeepSeekV32Parser(DsmlParser):
    """A parser of DSML in which the element around the calls is named `function_calls`.

    vLLM calls this format `deepseek_v32`, and SGLang calls it `deepseekv32`.
    """

    section = "function_calls"


class DeepSeekV4Parser(DsmlParser):
    """A parser of DSML in which the element around the calls is named `tool_calls`."""

    section = "tool_calls"


class DeepSeekV41Parser(DsmlParser):
    """A parser of DSML in which the element around the calls is named `calls`, and a space precedes element names."""

    section = "calls"
    prefix = "｜DSML｜ "
