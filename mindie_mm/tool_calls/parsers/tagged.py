"""Formats in which the value of each argument stands between tags."""

from __future__ import annotations

from mindie_mm.tool_calls.scanner import Step
from mindie_mm.tool_calls.typed_text import TypedTextParser


class Qwen3CoderParser(TypedTextParser):
    r"""A parser of `<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>`.

    A newline directly after the opening tag of a value and a newline directly before its closing tag are not part of
    the value. The model sometimes omits `<tool_call>` or `</parameter>`. `</parameter>` ends a value only if
    `<parameter=` or `</function>` follows, and `</function>` ends a value only if `</tool_call>` follows. vLLM and
    SGLang call this format `qwen3_coder`.
    """

    in_templates = ("<parameter=",)
    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>", "<function=")
    closings = ("</tool_call>",)
    ends_reasoning = True
    around = ("", "\n", "")
    call_tags = ("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>")
    tags_of_argument = ("<parameter={name}>\n", "\n</parameter>\n")
    excluded = ("<parameter=", "</parameter>", "</function>")

    def calls(self, opening: str) -> Step[None]:
        """Parse one call."""
        if opening != "<function=":
            yield from self.space()
            yield from self.expect("<function=")
        name = yield from self.name()
        yield from self.expect(">")
        self.start_arguments(name)
        yield from self.space()
        while (yield from self.expect("<parameter=", "</function>")) == "<parameter=":
            parameter = yield from self.until(">")
            yield from self.expect(">")
            yield from self.accept("\n")
            yield from self.argument(parameter, self._value_ends)
            yield from self.space()
        self.end_arguments()
        yield from self.close("</tool_call>")

    def _value_ends(self) -> Step[bool]:
        has_newline = yield from self.accept("\n")
        if (yield from self.surely_accept("</parameter>")):
            yield from self.space()
            return bool((yield from self.surely_follows("<parameter=", "</function>")))
        if (yield from self.surely_follows("<parameter=")):
            return bool(has_newline)
        start = self._at - self._kept
        if not (yield from self.surely_accept("</function>")):
            return False
        yield from self.space()
        ends = (yield from self.surely_at_end()) or (yield from self.surely_follows("</tool_call>"))
        self._at = self._kept + start
        return bool(ends)


class MiniCPM5Parser(TypedTextParser):
    """A parser of `<function name="f"><param name="a">1</param></function>`. vLLM calls this format `minicpm5`."""

    in_templates = ("<function name=",)
    markers = ("<function", "</function>", "<param", "</param>")
    openings = ('<function name="',)
    closings = ("</function>",)
    call_tags = ('<function name="{name}">', "</function>")
    tags_of_argument = ('<param name="{name}">', "</param>")
    excluded = ("</param>",)

    def calls(self, opening: str) -> Step[None]:
        """Parse one call."""
        name = yield from self.name()
        yield from self.expect('">')
        self.start_arguments(name)
        yield from self.space()
        while (yield from self.expect('<param name="', "</function>")) != "</function>":
            parameter = yield from self.until('">')
            yield from self.expect('">')
            yield from self.argument(parameter, self._value_ends)
            yield from self.space()
        self.end_arguments()

    def _value_ends(self) -> Step[bool]:
        if not (yield from self.surely_accept("</param>")):
            return False
        yield from self.space()
        return bool((yield from self.surely_follows("<param name=", "</function>")))


class Glm45Parser(TypedTextParser):
    r"""A parser of `<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`.

    Whitespace within a value is part of the value. Newlines between the tags may be missing, as in GLM-4.7. vLLM and
    SGLang call this format `glm45`.
    """

    in_templates = ("<arg_key>",)
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    openings = ("<tool_call>",)
    closings = ("</tool_call>",)
    around = ("", "\n", "")
    call_tags = ("<tool_call>{name}", "\n</tool_call>")
    tags_of_argument = ("\n<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>")
    excluded = ("</arg_value>", "</tool_call>")

    def calls(self, opening: str) -> Step[None]:
        """Parse one call."""
        yield from self.space()
        name = yield from self.name()
        yield from self.space()
        following = yield from self.expect("<arg_key>", "</tool_call>")
        self.start_arguments(name)
        while following == "<arg_key>":
            key = yield from self.until("</arg_key>")
            yield from self.expect("</arg_key>")
            yield from self.space()
            yield from self.expect("<arg_value>")
            yield from self.argument(key.strip(), self._value_ends)
            yield from self.space()
            following = yield from self.expect("<arg_key>", "</tool_call>")
        self.end_arguments()

    def _value_ends(self) -> Step[bool]:
        if (yield from self.surely_accept("</arg_value>")):
            return True
        start = self._at - self._kept
        if not (yield from self.surely_accept("</tool_call>")):
            return False
        # If </arg_value> is missing, the value ends only where the call ends.
        yield from self.space()
        ends = (yield from self.surely_at_end()) or (yield from self.surely_follows("<tool_call>"))
        self._at = self._kept + start
        return bool(ends)


class Glm47Parser(Glm45Parser):
    """A parser of `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.

    vLLM and SGLang call this format `glm47`.
    """

    in_templates = ("</arg_key><arg_value>",)  # without a newline between the tags
    around = ("", "", "")
    call_tags = ("<tool_call>{name}", "</tool_call>")
    tags_of_argument = ("<arg_key>{name}</arg_key><arg_value>", "</arg_value>")
