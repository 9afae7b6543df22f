"""Tests for tool calls with a model whose chat template does not use the variable `tools`."""

import json
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from mindie_mm.tool_calls.parser import MAX_CALLS
from tests.processor_time import processor_s
from tests.service.chat_assembling import Assembled, assembled, whole
from tools.serving import RunningService
from training.questions import CHAT_ANSWERS

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}


def tool(name: str, parameters: Any = None, **changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **changes}}


TOOLS = [tool("get_weather", WEATHER, description="Returns the weather."), tool("now")]
END = 779
"""Id of the end-of-sequence token."""
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(client: openai.OpenAI, **changes: Any) -> Assembled:
    given = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 200, "tools": TOOLS} | changes
    if given.get("stream"):
        return assembled(client.chat.completions.create(**given, stream_options={"include_usage": True}))
    return whole(client.chat.completions.create(**given))


def prompt(http: httpx2.Client, messages: list[Any], **changes: Any) -> str:
    tokens = http.post("/tokenize", json={"messages": messages} | changes).json()["tokens"]
    return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


@pytest.mark.parametrize(
    ("choice", "stream"),
    [(NAMED, False), (NAMED, True), ({"name": "get_weather"}, False), ({"type": "tool", "name": "get_weather"}, True)],
)
def test_a_named_tool_is_called_with_valid_arguments(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = ask(client, tool_choice=choice, stream=stream)
    ((name, arguments),) = answer.calls
    assert (name, answer.content, answer.finish_reason) == ("get_weather", "", "tool_calls")
    jsonschema.validate(json.loads(arguments), WEATHER)


def test_required_calls_are_valid_and_several_unless_they_must_not_be(client: openai.OpenAI) -> None:
    digit = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
    tools = [tool("f", digit), tool("g")]
    shared: dict[str, Any] = {"temperature": 2.0, "seed": 5, "max_tokens": 600, "tools": tools}
    several = ask(client, tool_choice="required", logit_bias={str(END): -100}, stream=True, **shared)
    assert (several.finish_reason, several.content) == ("tool_calls", "")
    assert len(several.calls) == len(set(several.ids)) == MAX_CALLS
    for name, arguments in several.calls:
        jsonschema.validate(json.loads(arguments), digit if name == "f" else {"maxProperties": 0})
    one = ask(client, tool_choice={"type": "any"}, parallel_tool_calls=False, **shared)
    assert one.calls == several.calls[:1]
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"name": "g"}]}}
    assert {name for name, _ in ask(client, tool_choice=some, parallel_tool_calls=False, **shared).calls} == {"g"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_output_limit_cuts_a_call(client: openai.OpenAI, stream: bool) -> None:
    complete = ask(client, tool_choice=NAMED)
    limit = complete.usage.completion_tokens - 20
    cut = ask(client, tool_choice=NAMED, max_tokens=limit, stream=stream)
    assert (cut.finish_reason, cut.content) == ("length", "")
    assert complete.calls[0][1].startswith(cut.calls[0][1])


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_may_answer_in_words(client: openai.OpenAI, http: httpx2.Client, stream: bool) -> None:
    for given in ({}, {"tool_choice": "auto"}, {"tools": TOOLS[:1], "tool_choice": "auto", "n": 2}):
        answer = ask(client, stream=stream, max_tokens=4, **given)
        assert (answer.calls, answer.finish_reason, bool(answer.content)) == ([], "length", True)
    for given in ({"tool_choice": "none"}, {"tools": []}):
        assert ask(client, stream=stream, **given).content == CHAT_ANSWERS["hello"]
        assert prompt(http, HELLO, tools=TOOLS, tool_choice="none") == prompt(http, HELLO)


def test_the_fields_of_a_plain_chat_work_beside_tools(client: openai.OpenAI) -> None:
    for stream in (False, True):
        called = ask(client, tool_choice=NAMED, logprobs=True, top_logprobs=2, stream=stream)
        assert "".join(called.tokens).startswith('<tool_call>\n{"name": "get_weather"')
        assert len(called.tokens) == called.usage.completion_tokens
        stopped = ask(client, tool_choice=NAMED, stop=['"days"'], logprobs=True, stream=stream)
        assert (stopped.finish_reason, stopped.calls) == (called.finish_reason, called.calls), (
            "it has no effect in calls"
        )
        assert len(stopped.tokens) == stopped.usage.completion_tokens
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        tools=TOOLS,
        tool_choice=NOW,
        n=3,
        max_tokens=99,
        seed=1,  # type: ignore[arg-type]
    )
    ids = [whole(answer, index).ids[0] for index in range(3)]
    assert len({*ids}) == 3
    # If tool_choice is "auto", the model may call a tool or answer with JSON.
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    both = ask(client, response_format=shaped)
    assert both.content == '{"a": "b"}' or both.calls
    assert len(ask(client, response_format=shaped, tool_choice=NAMED).calls) == 1


def test_vllms_fields_work_beside_tools(http: httpx2.Client) -> None:
    """The answer continues a message with a call and echoes the message. A stream reports each token once."""
    body: dict[str, Any] = {
        "messages": [*HELLO, {"role": "assistant", "content": "I look."}],
        "continue_final_message": True,
        "echo": True,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "tools": TOOLS,
        "tool_choice": NAMED,
        "temperature": 0,
        "max_tokens": 200,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
    }
    answer = http.post(CHAT, json=body).raise_for_status().json()
    ((choice,), prompt_ids) = answer["choices"], answer["prompt_token_ids"]
    message = choice["message"]
    ((called,), tokens) = message["tool_calls"], choice["token_ids"]
    assert (message["role"], message["content"], choice["finish_reason"]) == ("assistant", "I look.", "tool_calls")
    jsonschema.validate(json.loads(called["function"]["arguments"]), WEATHER)
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in tokens]
    texts = [http.post("/detokenize", json={"tokens": ids}).json()["prompt"] for ids in (prompt_ids, tokens)]
    assert texts[0].endswith("<|im_start|>assistant\nI look.")
    assert texts[1].startswith("<tool_call>")
    tokenized = {name: body[name] for name in ("messages", "tools", "tool_choice", "continue_final_message")}
    assert http.post("/tokenize", json=tokenized).json()["tokens"] == prompt_ids
    lines = http.post(CHAT, json=body | {"stream": True}).text.split("\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["delta"].get("content", "") for part in parts) == "I look."
    assert [token for part in parts for token in part.get("token_ids", ())] == tokens
    assert {chunk["system_fingerprint"] for chunk in chunks} == {answer["system_fingerprint"]}


def test_tools_and_calls_are_described_where_the_template_has_no_place(http: httpx2.Client) -> None:
    call = {"id": "c1", "index": 0, "type": "function", "function": {"name": "now", "arguments": '{"a": "é"'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call, call | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "one"}]},
    ]
    written = '<tool_call>\n{"name": "now", "arguments": {"a": "é"}\n</tool_call>'
    history = (
        f"<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n{written}\n{written}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    found = prompt(http, messages, tools=TOOLS)
    assert found.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(TOOLS[0]) in found
    assert found.endswith(history)
    bare = prompt(http, messages)
    assert bare == f"<|im_start|>system\nBe brief.<|im_end|>\n{history}"
    # Open WebUI always sends tools, and its earlier calls have an index.
    body = {"model": "tiny", "messages": messages, "tools": TOOLS, "stream": True, "max_tokens": 8}
    assert http.post(CHAT, json=body).status_code == 200


DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
WIDE = {"type": "object", "properties": {f"field_{i}": {"enum": [f"{i} {j}" for j in range(99)]} for i in range(99)}}


@pytest.mark.parametrize(
    ("tools", "param", "message"),
    [
        ([tool(f"tool_{i}") for i in range(1000)], "tools", "Offer fewer tools"),
        ([tool("a" * 10_000)], "tools", "has 10000 characters; it must have 1 to 256"),
        ([tool("")], "tools", "has 0 characters"),
        ([tool("a\0b")], "tools", "cannot be printed"),
        ([tool("a\ud800")], None, ""),
        ([tool("a"), tool("a")], "tools", "which is also the name of another tool"),
        ([tool("a", DEEP)], None, ""),
        ([tool("a", WIDE)], "tools", "limit"),
        ([tool("a", {"$ref": "#"})], "tools", ""),
        ([tool("a", {"properties": {"b\0": {"pattern": "(x{1000}){1000}"}}, "required": ["b\0"]})], "tools", None),
        ([tool("a", {"type": "string"})], "tools", "must be of type object"),
        ([tool("a", {"not": {}})], "tools", "the parameters of a tool are not supported: "),
        (
            [tool("a", {"properties": {"b": {"type": "c"}}})],
            "tools",
            "a tool are not supported: failed to compile JSON schema: Invalid type: c",
        ),
        ([tool("a", {"properties": 3})], "tools", ""),
        ([tool("a", strict="yes")], "tools", "strict is of type str; it must be true or false"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_tools_that_cannot_be_served_are_refused_within_a_second(
    service: RunningService, http: httpx2.Client, tools: list[Any], param: str | None, message: str | None
) -> None:
    for choice in ("required", "auto"):
        body = json.dumps({"messages": HELLO, "tools": tools, "tool_choice": choice, "max_tokens": 8})
        started_s = processor_s(service.process.pid)
        answer = http.post(CHAT, content=body.encode(), headers={"Content-Type": "application/json"})
        assert processor_s(service.process.pid) - started_s < 1
        if choice == "required" and message is not None:
            error = answer.json()["error"]
            assert (answer.status_code, message in error["message"]) == (400, True), error
            assert "\n" not in error["message"]
            assert param in (None, error["param"])
        else:  # the service may check other schemas only when a tool is called, or not at all
            assert answer.status_code in (200, 400)
    assert http.get("/health").status_code == 200
    assert service.wait_until_free()["blocks"] == 0


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"type": "function", "function": {"name": "other"}}, "has the name 'other', which is not the name of a tool"),
        ("sometimes", "tool_choice='sometimes' must be"),
        ({"type": "web_search"}, "must be"),
        ({"type": "function", "function": {"name": 5}}, "must be"),
        ({"type": "function", "function": {"name": ""}}, "has the name '', which is not the name of a tool"),
        ([], "must be"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "must be"),
    ],
    ids=str,
)
def test_a_choice_of_an_unknown_form_is_refused(http: httpx2.Client, choice: Any, message: str) -> None:
    for path in (CHAT, "/tokenize"):
        error = http.post(path, json={"messages": HELLO, "tools": TOOLS, "tool_choice": choice}).json()["error"]
        assert (error["param"], message in error["message"]) == ("tool_choice", True), error
