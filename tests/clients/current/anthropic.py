"""Scenarios of anthropic for Python."""

from __future__ import annotations

from typing import Any

import anthropic
from scenarios import (
    HELLO,
    HELLO_BACK,
    IMAGE,
    KEY,
    MODEL,
    PDF,
    RED_SQUARE,
    URL,
    WEATHER,
    WHAT,
    check_weather,
    report,
)

CLIENT = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL: Any = {"name": "get_weather", "description": "Weather.", "input_schema": WEATHER}
MESSAGES: Any = [{"role": "user", "content": HELLO}]
ASK: Any = {"model": MODEL, "max_tokens": 300, "extra_body": {"temperature": 0}}
QUESTION = {"type": "text", "text": WHAT}


def chat() -> None:
    answer = CLIENT.messages.create(**ASK, messages=MESSAGES)
    assert (answer.content[0].text, answer.stop_reason) == (HELLO_BACK, "end_turn")
    assert answer.usage.output_tokens > 0


def chat_streamed() -> None:
    with CLIENT.messages.stream(**ASK, messages=MESSAGES, system="") as stream:
        pieces = [*stream.text_stream]
        answer = stream.get_final_message()
    assert "".join(pieces) == answer.content[0].text == HELLO_BACK
    assert answer.usage.output_tokens > 0


def raw_events() -> None:
    with CLIENT.messages.create(**ASK, messages=MESSAGES, stream=True) as stream:
        kinds = [event.type for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def image() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE.split(",")[1]}
    content: Any = [{"type": "image", "source": source}, QUESTION]
    answer = CLIENT.messages.create(**ASK, messages=[{"role": "user", "content": content}])
    assert answer.content[0].text == RED_SQUARE


def pdf() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    content: Any = [{"type": "document", "source": source, "cache_control": {"type": "ephemeral"}}, QUESTION]
    answer = CLIENT.messages.create(**ASK, messages=[{"role": "user", "content": content}])
    assert answer.content[0].text == RED_SQUARE


def count_tokens() -> None:
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=[TOOL])
    answer = CLIENT.messages.create(**ASK | {"max_tokens": 1}, messages=MESSAGES, tools=[TOOL])
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def tool_left_to_the_model() -> None:
    assert CLIENT.messages.create(**ASK | {"max_tokens": 8}, messages=MESSAGES, tools=[TOOL]).content


def tool_called_and_result() -> None:
    choices: Any = ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"})
    for choice in choices:
        answer = CLIENT.messages.create(**ASK, messages=MESSAGES, tools=[TOOL], tool_choice=choice)
        (call,) = answer.content
        check_weather(call.input)
        assert answer.stop_reason == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
        turns = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        assert CLIENT.messages.create(**ASK | {"max_tokens": 8}, messages=turns, tools=[TOOL]).content


def tool_called_streamed() -> None:
    given: Any = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    with CLIENT.messages.stream(**ASK, messages=MESSAGES, **given) as stream:
        answer = stream.get_final_message()
    for call in answer.content:
        check_weather(call.input)


def structured() -> None:
    form: Any = {"format": {"type": "json_schema", "schema": WEATHER}}
    answer = CLIENT.messages.create(**ASK, messages=MESSAGES, output_config=form)
    check_weather(answer.content[0].text)


def thinking() -> None:
    settings: Any = {"type": "enabled", "budget_tokens": 1024}
    assert CLIENT.messages.create(**ASK, messages=MESSAGES, thinking=settings).content


def errors() -> None:
    cases: Any = (
        ({"model": "claude"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError),
    )
    for changes, kind in cases:
        error = _error({"messages": MESSAGES} | changes)
        assert isinstance(error, kind), error
        assert error.body["type"] == "error"
        assert error.request_id


def _error(given: dict[str, Any]) -> Any:
    try:
        return CLIENT.messages.create(**ASK | given)
    except anthropic.APIStatusError as error:
        return error


report(globals())
