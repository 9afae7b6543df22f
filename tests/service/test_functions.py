"""Tests for `functions` and `function_call`, OpenAI's deprecated form of tools."""

import json
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from tests.service.test_tool_calls import HELLO, TOOLS, WEATHER, ask, prompt

FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
WEATHER_CALL: Any = {"name": "get_weather"}


def answer(client: openai.OpenAI, **changes: Any) -> tuple[str | None, Any, str]:
    """Return the content of an answer, its call as a dict, and its finish reason."""
    given: Any = {"messages": HELLO, "temperature": 0, "max_tokens": 200, "functions": FUNCTIONS} | changes
    created = client.chat.completions.create(model="tiny", **given)
    if not given.get("stream"):
        (choice,) = created.choices
        assert choice.message.tool_calls is None
        call = choice.message.function_call
        return choice.message.content, call and call.model_dump(), choice.finish_reason
    content, call, reason = "", {}, None
    for chunk in created:
        (choice,) = chunk.choices
        assert (reason, choice.delta.tool_calls) == (None, None)
        content += choice.delta.content or ""
        if (more := choice.delta.function_call) is not None:
            assert (more.name is None) == bool(call), "only the first delta has the name"
            call = {"name": more.name or call["name"], "arguments": call.get("arguments", "") + more.arguments}
        reason = choice.finish_reason
    assert reason is not None
    return content or None, call or None, reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called_with_the_arguments_of_the_tool(client: openai.OpenAI, stream: bool) -> None:
    content, call, reason = answer(client, function_call=WEATHER_CALL, stream=stream)
    assert (content, call["name"], reason) == (None, "get_weather", "function_call")
    jsonschema.validate(json.loads(call["arguments"]), WEATHER)
    named = {"type": "function", "function": WEATHER_CALL}
    assert ask(client, tool_choice=named).calls == [(call["name"], call["arguments"])]


@pytest.mark.parametrize("stream", [False, True])
def test_the_output_limit_cuts_the_call_of_a_function(client: openai.OpenAI, stream: bool) -> None:
    whole = ask(client, tool_choice={"type": "function", "function": WEATHER_CALL})
    limit = whole.usage.completion_tokens - 20
    _, call, reason = answer(client, function_call=WEATHER_CALL, stream=stream, max_tokens=limit)
    assert (call["name"], reason) == ("get_weather", "length")
    assert whole.calls[0][1].startswith(call["arguments"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_may_answer_in_words_instead_of_calling_a_function(client: openai.OpenAI, stream: bool) -> None:
    for given in ({}, {"function_call": "auto"}):
        content, call, reason = answer(client, stream=stream, max_tokens=4, **given)
        assert (bool(content), call, reason) == (True, None, "length")
    silent = answer(client, stream=stream, function_call="none")
    assert silent == answer(client, stream=stream, functions=[])
    assert silent[1:] == (None, "stop")


def test_functions_and_their_history_make_the_prompt_of_tools(http: httpx2.Client) -> None:
    assert prompt(http, HELLO, functions=FUNCTIONS) == prompt(http, HELLO, tools=TOOLS)
    assert prompt(http, HELLO, functions=FUNCTIONS, function_call="none") == prompt(http, HELLO)
    called = {"name": "get_weather", "arguments": '{"city": "Rome", "days": 1}'}
    older = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "get_weather", "content": "warm"},
    ]
    newer = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
    ]
    assert prompt(http, older, functions=FUNCTIONS) == prompt(http, newer, tools=TOOLS)
    assert prompt(http, older) == prompt(http, newer)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"functions": [{}]}, "functions", "functions[0].name is missing; it must be a string"),
        ({"functions": [{"name": ""}]}, "functions", "functions[0].name has 0 characters"),
        ({"functions": [{"name": "a" * 10_000}]}, "functions", "has 10000 characters; it must have 1 to 256"),
        ({"functions": [{"name": "a\0"}]}, "functions", "cannot be printed"),
        ({"functions": [{"name": "a"}] * 2}, "functions", "functions[1].name is 'a', which is also the name"),
        ({"functions": [{"name": "a", "parameters": 3}]}, "functions", "functions[0].parameters is of type int"),
        (
            {"functions": FUNCTIONS, "function_call": {"name": "b"}},
            "function_call",
            "has the name 'b', which is not the name",
        ),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call", "must be 'none', 'auto' or"),
        ({"functions": FUNCTIONS, "function_call": {"name": 5}}, "function_call", "must be 'none', 'auto' or"),
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions", "leave functions out"),
        ({"functions": FUNCTIONS, "tool_choice": "none"}, "functions", "leave functions out"),
        ({"tools": TOOLS, "function_call": "none"}, "function_call", "there are no functions; with tools, use tool_ch"),
        ({"function_call": WEATHER_CALL}, "function_call", "there are no functions"),
    ],
    ids=lambda given: str(given)[:50],
)
def test_functions_that_cannot_be_served_are_refused(
    http: httpx2.Client, path: str, fields: Any, param: str, message: str
) -> None:
    error = http.post(path, json={"messages": HELLO} | fields).json()["error"]
    assert (error["code"], error["param"], message in error["message"]) == (400, param, True), error


def test_a_schema_that_cannot_be_enforced_is_blamed_on_functions(http: httpx2.Client) -> None:
    for parameters in ({"not": {}}, {"type": "string"}, {"properties": 3}):
        fields = {"functions": [{"name": "a", "parameters": parameters}], "function_call": {"name": "a"}}
        error = http.post("/v1/chat/completions", json={"messages": HELLO} | fields).json()["error"]
        assert (error["code"], error["param"]) == (400, "functions"), error
        assert "grammar" not in error["message"], "the service wrote the grammar, not the client"
