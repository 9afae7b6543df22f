"""Tests over HTTP of tool calls as real models write them: invalid, incomplete and within reasoning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.scripted import TINY, make_scripted
from tests.service.chat_assembling import Assembled, assembled, whole
from tests.warm import running_service
from tools.serving import RunningService

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
NO_OUTPUT = "the parameters of a tool are not supported: no output can match it"
CALL = '<tool_call>\n{"name": "f", "arguments": '
SCRIPTS = {
    "nan": [CALL + '{"x": NaN, "y": 2}}\n</tool_call>'],
    "brackets": [CALL + '{"x": [1, 2}', ', "y": 3}}\n</tool_call>'],
    "no_brace": [CALL + '{"a": 5}\n</tool_call>'],
    "newline": [CALL + '{"code": "line 1', '\nline 2"}}\n', "</tool_call>"],
    "empty": [CALL + '""}\n</tool_call>'],
    "two_in_one": [CALL + '{"a": 9}}\n', '{"name": "g", "arguments": {"b": 9}}\n</tool_call>'],
    "ends_early": [CALL + '{"a": 5'],
    "speaks": ["Certainly. ", CALL + '{"x": "a\\nb"}}\n</tool_call>'],
    "not_a_call": ["<tool_call>\nf(a=5)\n</tool_call>"],
    "cut": [CALL, '{"a": ', '"xyz', '"}', "}\n</tool_call>"],
    "thinks": ["<think>The user wants", " a list.\n\n", "I write two lines.</think>first\n", "second\n\nthird"],
    "answers": ["first\n", "\nsecond"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("scripted")
    make_scripted(folder / "model", SCRIPTS)
    given = settings | {"spool": folder / "spool", "reasoning_parser": "qwen3"}
    with running_service(given, folder / "log", folder / "model") as running:
        yield running
        assert running.stop() == 0


def ask(service: RunningService, script: str, *, stream: bool, **changes: Any) -> Assembled:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        given = {"model": service.model, "messages": HELLO, "temperature": 0, "tools": TOOLS} | changes
        given["extra_body"] = {"chat_template_kwargs": {"script": script}, **given.get("extra_body", {})}
        if stream:
            return assembled(client.chat.completions.create(**given, stream=True))
        return whole(client.chat.completions.create(**given))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["\n", "x", '": ', "}", "</tool_call>"])
def test_a_stop_string_never_leaves_half_a_call(scripted: RunningService, stop: str, stream: bool) -> None:
    called = ask(scripted, "speaks", stream=stream, stop=[stop])
    expected = ("Certainly.", [("f", '{"x": "a\\nb"}')], "tool_calls")
    assert (called.content, called.calls, called.finish_reason) == expected
    text = ask(scripted, "speaks", stream=stream, stop=["tain"])
    assert (text.content, text.calls, text.finish_reason) == ("Cer", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ("nan", [("f", '{"x": NaN, "y": 2}')]),
        ("brackets", [("f", '{"x": [1, 2}, "y": 3}')]),
        ("no_brace", [("f", '{"a": 5}')]),
        ("newline", [("f", '{"code": "line 1\\nline 2"}')]),
        ("empty", [("f", "{}")]),
        ("two_in_one", [("f", '{"a": 9}'), ("g", '{"b": 9}')]),
        ("ends_early", [("f", '{"a": 5')]),
    ],
)
def test_a_call_is_whole_and_the_finish_reason_says_so(
    scripted: RunningService, script: str, calls: list[tuple[str, str]], stream: bool
) -> None:
    answer = ask(scripted, script, stream=stream)
    assert (answer.calls, answer.content, answer.finish_reason) == (calls, "", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_no_call_is_content(scripted: RunningService, stream: bool) -> None:
    answer = ask(scripted, "not_a_call", stream=stream)
    assert (answer.calls, answer.content, answer.finish_reason) == ([], SCRIPTS["not_a_call"][0], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_cuts_the_arguments_to_a_prefix(scripted: RunningService, stream: bool) -> None:
    cut = [ask(scripted, "cut", stream=stream, max_tokens=length) for length in range(1, 7)]
    assert [answer.finish_reason for answer in cut] == ["length"] * 5 + ["tool_calls"]
    arguments = [answer.calls[0][1] if answer.calls else None for answer in cut]
    assert arguments == [None, '{"a": ', '{"a": "xyz', '{"a": "xyz"}', '{"a": "xyz"}', '{"a": "xyz"}']
    assert not any(answer.content for answer in cut)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_within_a_call_leaves_text(scripted: RunningService, stream: bool) -> None:
    asked = {"messages": HELLO, "tools": TOOLS, "chat_template_kwargs": {"script": "cut"}, "return_token_ids": True}
    answer = httpx2.post(scripted.url + CHAT, json=asked, timeout=300).raise_for_status().json()
    ids = answer["choices"][0]["token_ids"]
    for number in range(len(ids) - 1):
        cut = ask(scripted, "cut", stream=stream, extra_body={"stop_token_ids": [ids[number]]})
        if number < 4:
            assert (cut.calls, cut.content, cut.finish_reason) == ([], "".join(SCRIPTS["cut"][:number]), "stop")
        else:
            assert (cut.calls, cut.finish_reason) == ([("f", '{"a": "xyz"}')], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_apply_to_the_content_and_not_to_the_reasoning(scripted: RunningService, stream: bool) -> None:
    plan = "The user wants a list.\n\nI write two lines."
    stopped = ask(scripted, "thinks", stream=stream, stop=["\n\n"])
    assert (stopped.reasoning, stopped.content, stopped.finish_reason) == (plan, "first\nsecond", "stop")
    assert ask(scripted, "thinks", stream=stream, stop=["want"]).content == "first\nsecond\n\nthird"
    across = ask(scripted, "thinks", stream=stream, stop=["lines.</think>first", "st\nse"])
    assert (across.reasoning, across.content) == (plan, "fir")
    # Without reasoning, and with reasoning in the content, stop strings apply from the beginning.
    assert ask(scripted, "answers", stream=stream, stop=["\n\n"]).content == "first"
    joined = ask(scripted, "thinks", stream=stream, stop=["\n\n"], extra_body={"separate_reasoning": False})
    assert joined.content == "<think>The user wants a list."


@pytest.mark.parametrize("kind", ["output_text", "input_text"])
def test_parts_of_the_responses_api_are_texts(scripted: RunningService, kind: str) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": [{"type": kind, "text": "Hi", "annotations": []}]}]
    with httpx2.Client(base_url=scripted.url, timeout=300) as http:
        counts = []
        for content in (messages[-1]["content"], "Hi"):
            body = {"messages": [*HELLO, {"role": "assistant", "content": content}, *HELLO]}
            counts.append(http.post("/tokenize", json=body).raise_for_status().json()["tokens"])
        assert counts[0] == counts[1]
        refused = http.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": "poem", "text": "a"}]}]})
        assert refused.status_code == 400
        assert "messages[0].content[0].type='poem' must be one of text, " in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[httpx2.Client]:
    """Run the embedded checkpoint with a chat template that renders tools, and calls in the format of Qwen3-Coder."""
    folder = tmp_path_factory.mktemp("coder")
    shutil.copytree(TINY, folder / "model")
    file = folder / "model/tokenizer_config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    tools = "{% for tool in tools or [] %}<|im_start|>system\n{{ tool | tojson }}<|im_end|>\n{% endfor %}"
    file.write_text(json.dumps(written | {"chat_template": tools + written["chat_template"]}), encoding="utf-8")
    given = settings | {"spool": folder / "spool", "tool_call_parser": "qwen3_coder"}
    with (
        running_service(given, folder / "log", folder / "model") as running,
        httpx2.Client(base_url=running.url, timeout=300) as http,
    ):
        yield http
        assert running.stop() == 0


def required(schema: Any, **changes: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"s": schema}, "required": ["s"]}
    function = {"name": "f", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    return {**body, "temperature": 0, "max_tokens": 200, **changes}


def arguments_of(http: httpx2.Client, body: dict[str, Any]) -> tuple[str, str]:
    """Return the arguments of the call and the finish reason of an answer."""
    if not body.get("stream"):
        (choice,) = http.post(CHAT, json=body).raise_for_status().json()["choices"]
        calls = choice["message"].get("tool_calls") or [{"function": {"arguments": ""}}]
        return calls[0]["function"]["arguments"], choice["finish_reason"]
    lines = http.post(CHAT, json=body).raise_for_status().text.split("\n")
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    return "".join(call["function"]["arguments"] for call in calls), choices[-1]["finish_reason"]


def test_required_calls_in_raw_text_fit_their_schema(coder: httpx2.Client) -> None:
    for schema, value in (
        ({"type": "string", "enum": ["a", 1, None]}, "a"),
        ({"enum": ["a", "bb"], "minLength": 2}, "bb"),
        ({"type": "string", "format": "ipv4", "pattern": r"^(127\.0\.0\.1|1\.2\.3)$"}, "127.0.0.1"),
        ({"type": ["string", "null"], "enum": [None, 3]}, None),
    ):
        arguments, reason = arguments_of(coder, required(schema))
        assert (json.loads(arguments), reason) == ({"s": value}, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_without_output_is_refused_before_the_answer(coder: httpx2.Client, stream: bool) -> None:
    for schema in (
        {"type": "string", "format": "date", "maxLength": 5},
        {"type": "string", "format": "date", "pattern": "^2023-06-31$"},
    ):
        answer = coder.post(CHAT, json=required(schema, stream=stream))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["message"]) == ("tools", NO_OUTPUT)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_closing_tag_that_is_cut_off_is_not_part_of_the_arguments(coder: httpx2.Client, stream: bool) -> None:
    body = required({"enum": ["ab"]})
    num_tokens = coder.post(CHAT, json=body).json()["usage"]["completion_tokens"]
    found = set()
    for length in range(num_tokens - 26, num_tokens):  # the tags after the value, and the value
        arguments, reason = arguments_of(coder, body | {"max_tokens": length, "stream": stream})
        assert (reason, '{"s": "ab"}'.startswith(arguments)) == ("length", True), arguments
        found.add(arguments)
    assert found >= {'{"s": "ab', '{"s": "ab"}'}
