"""Tests for Anthropic's Messages API."""

import base64
import json
from collections.abc import Iterable
from typing import Any

import httpx2
import pytest

from service.messages.answer import MessageEvents
from tests.service.test_tool_calls import WEATHER
from tools.serving import RunningService

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
TOOL = {"name": "get_weather", "description": "Returns the weather.", "input_schema": WEATHER}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo", "days": 1}}


def ask(http: httpx2.Client, messages: list[Any], **changes: Any) -> dict[str, Any]:
    given = {"model": "tiny", "max_tokens": 30, "messages": messages, "temperature": 0} | changes
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-04-04"}
    answer = http.post("/v1/messages", json=given, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(http: httpx2.Client, messages: list[Any], **changes: Any) -> list[dict[str, Any]]:
    given = {"model": "tiny", "max_tokens": 30, "messages": messages, "temperature": 0, "stream": True} | changes
    answer = http.post("/v1/messages", json=given)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return parsed(answer.text)


def parsed(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream. Each has a line with its type, which clients require."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def assembled(stream: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, as anthropic's client assembles it. At most one block is open at a time."""
    message: dict[str, Any] = {}
    is_open = False
    for event in stream:
        match event["type"]:
            case "message_start":
                message = event["message"]
                assert (message["content"], message["stop_reason"]) == ([], None)
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open = True
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                assert is_open
                key = {
                    "text_delta": "text",
                    "thinking_delta": "thinking",
                    "signature_delta": "signature",
                    "input_json_delta": "json",
                }[delta["type"]]
                value = delta["partial_json" if key == "json" else key]
                block[key] = block.get(key, "") + value
            case "content_block_stop":
                is_open = False
                if (text := message["content"][event["index"]].pop("json", None)) is not None:
                    message["content"][event["index"]]["input"] = json.loads(text or "{}")
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert not is_open
    return message


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without ids, and without the numbers of cached tokens."""
    used = message["usage"]
    return {
        **message,
        "id": "",
        "content": [block | ({"id": ""} if "id" in block else {}) for block in message["content"]],
        "usage": (used["input_tokens"] + used["cache_read_input_tokens"], used["output_tokens"]),
    }


def image(data_url: str) -> dict[str, Any]:
    head, data = data_url.split(",")
    source = {"type": "base64", "media_type": head.removeprefix("data:").removesuffix(";base64"), "data": data}
    return {"type": "image", "source": source}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"system": [{"type": "text", "text": "Answer."}], "stop_sequences": ["picture"]},
        {"max_tokens": 4},
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 90},
        {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}, "max_tokens": 200},
        {"output_format": {"type": "json_schema", "schema": WEATHER}, "max_tokens": 200, "system": ""},
    ],
)
def test_a_stream_is_the_message_in_pieces(http: httpx2.Client, changes: dict[str, Any]) -> None:
    stream = events(http, HELLO, **changes)
    assert [event["type"] for event in stream[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    whole = ask(http, HELLO, **changes)
    assert comparable(assembled(stream)) == comparable(whole)
    expected = "tool_use" if "tools" in changes else "end_turn"
    if "stop_sequences" in changes:
        expected = "stop_sequence"
        assert whole["stop_sequence"] == "picture"
    assert whole["stop_reason"] == ("max_tokens" if changes.get("max_tokens") == 4 else expected)


def test_the_answer_is_that_of_a_chat(http: httpx2.Client, red_square: str) -> None:
    asked = [{"role": "user", "content": [image(red_square), {"type": "text", "text": "What is shown?"}]}]
    given = {"system": "Be brief.", "max_tokens": 20}
    answer = ask(http, asked, **given)
    parts = [{"type": "image_url", "image_url": {"url": red_square}}, {"type": "text", "text": "What is shown?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    chat = http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 20}).json()
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    used = answer["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": asked, "system": "Be brief."})
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}


def prompt(http: httpx2.Client, path: str, body: Any) -> int:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens" if "count" in path else "count"])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (  # results precede the text of their turn, and errors say so
            [
                *HELLO,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, CALL]},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "So?"},
                        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no city", "is_error": True},
                    ],
                },
            ],
            [
                *HELLO,
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {
                            "id": "toolu_1",
                            "type": "function",
                            "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no city"},
                {"role": "user", "content": "So?"},
            ],
        ),
        (  # system messages between others, and a document of every kind
            [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "system", "content": "b"},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "title": "t",
                            "source": {"type": "text", "media_type": "text/plain", "data": "c"},
                        },
                        {
                            "type": "document",
                            "source": {
                                "type": "base64",
                                "media_type": "text/plain",
                                "data": base64.b64encode(b"d").decode(),
                            },
                        },
                        {"type": "document", "source": {"type": "content", "content": "e"}},
                    ],
                },
            ],
            [
                {"role": "user", "content": "a"},
                {"role": "system", "content": "b"},
                {"role": "user", "content": [{"type": "text", "text": text} for text in ("t\n", "c", "d\n", "e")]},
            ],
        ),
    ],
)
def test_messages_become_those_of_a_chat(http: httpx2.Client, theirs: list[Any], ours: list[Any]) -> None:
    assert prompt(http, "/v1/messages/count_tokens", {"model": "tiny", "messages": theirs}) == prompt(
        http, "/tokenize", {"messages": ours}
    )


def test_images_of_urls_and_of_results_are_those_of_a_chat(http: httpx2.Client, red_square: str) -> None:
    source = {"type": "url", "url": red_square}
    image = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": "a"}, image]
    theirs = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": content}]},
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": red_square}}]
    function = {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 1}'}
    ours = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": parts},
    ]
    assert prompt(http, "/v1/messages/count_tokens", {"model": "tiny", "messages": theirs}) == prompt(
        http, "/tokenize", {"messages": ours}
    )


def test_the_last_message_of_the_assistant_is_continued(http: httpx2.Client) -> None:
    (block,) = ask(http, [*HELLO, {"role": "assistant", "content": "Hello! Show me a"}])["content"]
    assert block["text"].startswith(" picture")


def test_usage_texts_of_claude_code_do_not_reach_the_prompt(http: httpx2.Client) -> None:
    path, given = "/v1/messages/count_tokens", {"model": "tiny", "messages": HELLO}
    billing = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2"}]
    assert prompt(http, path, {**given, "system": billing}) == prompt(http, path, given)


def test_max_tokens_is_reduced_to_the_context(http: httpx2.Client) -> None:
    assert ask(http, HELLO, max_tokens=128_000)["stop_reason"] == "end_turn"


@pytest.mark.parametrize("changes", [{}, {"tools": [TOOL], "tool_choice": {"type": "any"}}])
def test_max_tokens_of_zero_fills_the_prefix_cache(http: httpx2.Client, changes: dict[str, Any]) -> None:
    given = {"model": "tiny", "messages": HELLO, "system": f"Be brief {len(changes)}. " * 20} | changes
    whole = http.post("/v1/messages", json=given | {"max_tokens": 0}).json()
    assert (whole["content"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert whole["usage"]["cache_read_input_tokens"] == 0
    stream = parsed(http.post("/v1/messages", json=given | {"max_tokens": 0, "stream": True}).text)
    assert [event["type"] for event in stream if event["type"] != "ping"] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    later = http.post("/v1/messages", json=given | {"max_tokens": 1}).json()["usage"]
    assert later["cache_read_input_tokens"] > 50


def test_a_call_that_is_cut_off_is_left_out(http: httpx2.Client) -> None:
    answer = ask(http, HELLO, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=30)
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")


def test_thinking_has_a_block_of_its_own() -> None:
    sent: list[dict[str, Any]] = []
    stream = MessageEvents(lambda event: sent.append(dict(event)), max_tokens=9)
    used = {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    function = {"name": "now", "arguments": ""}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "a", "reasoning_content": "a"},
        {"reasoning": "b", "reasoning_content": "b"},
        {"content": "c"},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": function}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "function": function}]},
        {},
    ]
    for delta in deltas:
        end = {"finish_reason": None if delta else "length", "stop_reason": None}
        stream.add({"id": "msg_1", "model": "m", "usage": used, "choices": [{"delta": delta, **end}]})
    stream.finish()
    message = assembled(sent)
    assert message["content"] == [
        {"type": "thinking", "thinking": "ab", "signature": "unsigned"},
        {"type": "text", "text": "c"},
        {"type": "tool_use", "id": "call_1", "name": "now", "input": {}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
    ]
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["input_tokens"] == 3


@pytest.mark.parametrize(
    ("changes", "status", "kind", "words"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": "Hello!"}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "invalid_request_error", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "invalid_request_error", "'video'"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_request_error", "messages[0].content is empty"),
        ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "gpt"}, 404, "not_found_error", "'gpt'"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error", "web_search"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, 400, "invalid_request_error", "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice.type is 'any', but"),
        ({"tools": [TOOL, TOOL]}, 400, "invalid_request_error", "tools[1].name is "),
        ({"tools": [TOOL | {"name": ""}]}, 400, "invalid_request_error", "tools[0].name has 0 characters"),
        ({"mcp_servers": [{"name": "m"}]}, 400, "invalid_request_error", "mcp_servers"),
        (
            {
                "system": "a",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "a"},
                            {"type": "image", "source": {"type": "url", "url": "ftp://host/a.png"}},
                        ],
                    }
                ],
            },
            400,
            "invalid_request_error",
            "ftp",
        ),
    ],
)
def test_errors_are_anthropics(
    http: httpx2.Client, changes: dict[str, Any], status: int, kind: str, words: str
) -> None:
    for stream in (False, True):
        given = {"model": "tiny", "max_tokens": 5, "messages": HELLO, "stream": stream} | changes
        answer = http.post("/v1/messages", json=given)
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), body
        assert words in body["error"]["message"]
        assert body["request_id"] == answer.headers["request-id"]


def test_errors_before_the_route_are_anthropics(http: httpx2.Client) -> None:
    for answer in (
        http.get("/v1/messages"),
        http.post("/v1/messages", content=b'{"model"', headers={"content-type": "application/json"}),
        http.post("/v1/messages", content=b" " * (9 << 20), headers={"content-type": "application/json"}),
    ):
        assert answer.status_code >= 400
        assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "request_too_large"


def test_nothing_is_left(service: RunningService) -> None:
    assert service.wait_until_free()["blocks"] == 0
