"""Tests for how `ChatDialect` passes tools and reasoning settings to a chat template."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from mindie_mm.errors import InputError
from mindie_mm.tokenize.text.chat_traits import ChatTraits
from mindie_mm.tool_calls.registry import parser_named
from service.request.chat_dialect import ChatDialect
from service.schemas.tool_types import ToolUse

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
TOOLS = [{"type": "function", "function": {"name": "weigh"}}]
CALLED: list[Any] = [*HELLO, {"role": "assistant", "tool_calls": [{"id": "call_1", **TOOLS[0]}]}]
PLACE = "{{ tools }}{{ tool_calls }}"


def written(
    template: str, mode: Literal["describe", "ignore", "refuse"] = "describe", parser: str = "hermes"
) -> ChatDialect:
    traits = ChatTraits(template, takes_system=True)
    return ChatDialect(parser_named(parser), None, traits, mode, {}, frozenset())


def test_tools_are_a_variable_where_the_template_has_a_place() -> None:
    use = ToolUse.of(TOOLS, None, None)
    for mode in ("describe", "ignore", "refuse"):
        found = written(PLACE, mode)  # type: ignore[arg-type]
        assert found.request(CALLED, use, {"a": 1}, None) == (CALLED, {"a": 1, "tools": TOOLS})
        assert found.reads_calls(use)
    messages, _ = written(PLACE, parser="mistral").request(CALLED, use, None, None)
    assert len(messages[1]["tool_calls"][0]["id"]) == 9
    assert written(PLACE).request(HELLO, ToolUse.of(TOOLS, "none", None), None, None) == (HELLO, {})


def test_calls_are_text_if_the_template_has_a_place_for_tools_only() -> None:
    (hello, called), variables = written("{{ tools }}", parser="granite").request(
        CALLED, ToolUse.of(TOOLS, None, None), None, None
    )
    assert (hello, variables) == (HELLO[0], {"tools": TOOLS})
    assert called == {"role": "assistant", "content": '<|tool_call|>[{"name": "weigh", "arguments": {}}]'}


def test_a_template_without_tools_gets_text_or_nothing_or_unchanged_tools() -> None:
    use, required = ToolUse.of(TOOLS, None, None), ToolUse.of(TOOLS, "required", None)
    (system, *rest), variables = written("{{ messages }}").request(CALLED, use, None, None)
    assert ("weigh" in system["content"], rest[0], variables) == (True, HELLO[0], {})
    assert rest[1]["content"] == '<tool_call>\n{"name": "weigh", "arguments": {}}\n</tool_call>'
    ignoring = written("{{ messages }}", "ignore")
    assert ignoring.request(CALLED, use, None, None) == (rest, {})
    assert not ignoring.reads_calls(use)
    with pytest.raises(InputError, match="--tools-without-template describe"):
        ignoring.request(HELLO, required, None, None)
    assert written("{{ messages }}", "refuse").request(CALLED, use, None, None) == (CALLED, {"tools": TOOLS})


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{{ reasoning_effort }}{{ enable_thinking }}", "none", {"reasoning_effort": "none"}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "low", {"enable_thinking": True}),
        ("{{ messages }}", "low", {"reasoning_effort": "low"}),  # the template ignores the variable
        ("{{ enable_thinking }}", None, {}),
    ],
)
def test_an_effort_is_a_variable_or_a_switch(template: str, effort: str | None, expected: dict[str, Any]) -> None:
    assert written(template).request(HELLO, ToolUse(), None, effort) == (HELLO, expected)
    given = {"enable_thinking": True}
    assert written(template).request(HELLO, ToolUse(), given, effort)[1] == expected | given


@pytest.mark.parametrize("effort", [("low", None), (None, {"reasoning_effort": "low"})])
def test_a_strict_service_refuses_an_effort_without_a_place(effort: tuple[Any, Any]) -> None:
    given, variables = effort
    strict = replace(written("{{ messages }}"), strict=True)
    with pytest.raises(InputError, match=r"reasoning_effort is 'low', but .* does not use it") as raised:
        strict.request(HELLO, ToolUse(), variables, given)
    assert raised.value.param == "reasoning_effort"
    assert strict.request(HELLO, ToolUse(), None, "none") == (HELLO, {"reasoning_effort": "none"})
    placed = replace(written("{{ reasoning_effort }}"), strict=True)
    assert placed.request(HELLO, ToolUse(), variables, given)[1] == {"reasoning_effort": "low"}
