"""Tests for earlier calls, in the form that each chat template expects, and tools that are described as text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mindie_mm.tool_calls.history import (
    num_calls,
    with_described_tools,
    with_own_ids,
    with_tool_calls,
    with_written_calls,
)
from mindie_mm.tool_calls.registry import FORMATS, parser_named
from tests.tool_calls.assembling import SAMPLES, answer_of, calls_of, name_of

TOOL = {"type": "function", "function": {"name": "weigh"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def call(call_id: str | None, name: str = "weigh", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY: list[Any] = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "tool_calls": [call("call_1"), call("abcDEF123", "lift")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "7 kg"},
    {"role": "tool", "tool_call_id": "abcDEF123", "content": "done"},
    {"role": "assistant", "tool_calls": [call("call_1", "lift")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
]


def ids(messages: list[Any]) -> list[tuple[list[str], str | None]]:
    return [([one["id"] for one in m.get("tool_calls", ())], m.get("tool_call_id")) for m in messages]


def test_calls_that_are_written_as_text_are_read_as_the_same_calls() -> None:
    calls = SAMPLES[0]["calls_two"]
    message = {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call("a", one["name"], json.dumps(one["arguments"], ensure_ascii=False)) for one in calls],
    }
    written = {name: with_written_calls(message, parser) for name, parser in FORMATS.items()}
    unchanged = {name for name, found in written.items() if found == message}
    assert unchanged >= {"qwen3_coder", "gemma4"}
    for name in FORMATS.keys() - unchanged - {"llama3_json", "pythonic"}:
        answer = answer_of(parser_named(name)(), [written[name]["content"]])
        assert (written[name].keys(), answer.content) == ({"role", "content"}, "I look."), name
        assert calls_of(answer) == calls, name
    for name in ("granite", "granite-20b-fc"):
        sample = next(sample for sample in SAMPLES if name_of(sample) == name)
        assert with_written_calls({**message, "content": None}, parser_named(name))["content"] == sample["two"]
    lfm2 = {"role": "assistant", "tool_calls": [call("a", "f", '{"s": "it\'s", "n": null}'), call("b", "g", "")]}
    text = """<|tool_call_start|>[f(s="it's", n=None), g()]<|tool_call_end|>"""
    assert with_written_calls(lfm2, parser_named("lfm2"))["content"] == text


def test_ids_have_the_form_that_the_template_requires() -> None:
    assert with_own_ids(HISTORY, parser_named("hermes")) == HISTORY
    for name in ("mistral", "mistral_v3"):
        found = ids(with_own_ids(HISTORY, parser_named(name)))
        first = found[1][0][0]
        assert re.fullmatch("[a-zA-Z0-9]{9}", first)
        assert found == [
            ([], None),
            ([first, "abcDEF123"], None),
            ([], first),
            ([], "abcDEF123"),
            ([first], None),
            ([], first),
        ]
    kimi = ids(with_own_ids(HISTORY, parser_named("kimi_k2")))
    assert kimi[1] == (["functions.weigh:0", "functions.lift:1"], None)
    assert [one for _, one in kimi[2:4]] == ["functions.weigh:0", "functions.lift:1"]
    assert kimi[4:] == [(["functions.lift:2"], None), ([], "functions.lift:2")]
    assert num_calls(HISTORY) == 3


@pytest.mark.parametrize(
    "message",
    [
        5,
        {},
        {"role": 5, "content": 5},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [5, {"function": 5}, {"function": {"name": 5}}]},
        {"role": "assistant", "function_call": 5},
        {"role": "tool", "tool_call_id": [], "content": 5},
        {"role": "user", "content": [5]},
    ],
    ids=str,
)
def test_invalid_messages_are_unchanged(message: Any) -> None:
    for name in ("mistral", "kimi_k2", "hermes"):
        assert with_own_ids([message], parser_named(name)) == [message]
    assert with_tool_calls([message, message]) == [message, message]
    for takes_system in (True, False):
        with_described_tools([*HISTORY, message, message], [TOOL], takes_system=takes_system)


def test_calls_and_results_become_text_in_alternating_turns() -> None:
    assert with_described_tools(HISTORY[:1], [], takes_system=True) == HISTORY[:1]
    written = '<tool_call>\n{"name": "weigh", "arguments": {}}\n</tool_call>\n'
    written += '<tool_call>\n{"name": "lift", "arguments": {}}\n</tool_call>'
    found = with_described_tools([*HISTORY, {"role": "user", "content": [IMAGE]}], [], takes_system=True)
    assert [message["role"] for message in found] == ["user", "assistant", "user", "assistant", "user"]
    assert found[1]["content"] == written
    both = "<tool_response>\n7 kg\n</tool_response>\n<tool_response>\ndone\n</tool_response>"
    assert found[2]["content"] == both
    assert found[4]["content"] == [text("<tool_response>\ndone\n</tool_response>\n"), IMAGE]
    # The arguments are invalid JSON, an object, or missing.
    odd = [call("a", arguments='{"a": '), call("b", arguments={"é": 1}), call("c", arguments=None)]
    (made,) = with_described_tools(
        [{"role": "assistant", "content": [text("Well.")], "tool_calls": odd}], [], takes_system=True
    )
    (part,) = made["content"]
    assert part["text"].split("\n")[2::3] == [
        '{"name": "weigh", "arguments": {"a": }',
        '{"name": "weigh", "arguments": {"é": 1}}',
        '{"name": "weigh", "arguments": {}}',
    ]


def test_tools_are_described_in_a_message_that_the_template_shows() -> None:
    user = {"role": "user", "content": [IMAGE, text("Hello!")]}
    system, same = with_described_tools([user], [TOOL], takes_system=True)
    assert (system["role"], same) == ("system", user)
    assert json.dumps(TOOL) in system["content"]
    (longer, _) = with_described_tools([{"role": "developer", "content": "Be kind."}, user], [TOOL], takes_system=True)
    assert longer == {"role": "developer", "content": f"Be kind.\n\n{system['content']}"}
    (without,) = with_described_tools([user], [TOOL], takes_system=False)
    assert without["content"] == [text(f"{system['content']}\n\n"), IMAGE, text("Hello!")]
    assert with_described_tools([], [TOOL], takes_system=False)[0]["role"] == "user"


def test_function_messages_become_tool_messages() -> None:
    called = {"name": "f", "arguments": "{}"}
    alone: list[Any] = [{"role": "function", "name": "f", "content": "1"}, 5, {"role": "assistant", "content": "Yes."}]
    call, result, again = with_tool_calls(
        [{"role": "assistant", "content": "So.", "function_call": called}, alone[0], alone[0]]
    )
    tool_call = call["tool_calls"][0]
    assert call == {"role": "assistant", "content": "So.", "tool_calls": [tool_call]}
    assert (tool_call["type"], tool_call["function"]) == ("function", called)
    assert result == again == {"role": "tool", "name": "f", "content": "1", "tool_call_id": tool_call["id"]}
    assert with_tool_calls(alone) == alone
