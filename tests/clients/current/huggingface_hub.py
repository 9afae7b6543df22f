"""Scenarios of huggingface_hub: InferenceClient. If its user gives no model, the client sends a placeholder name."""

from __future__ import annotations

import json
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient
from scenarios import BASE_URL, HELLO, HELLO_BACK, IMAGE, KEY, MODEL, RED_SQUARE, WEATHER, WHAT, check_weather, report

CLIENT = InferenceClient(base_url=BASE_URL, api_key=KEY)
MESSAGES: Any = [{"role": "user", "content": HELLO}]
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}


def chat() -> None:
    assert CLIENT.chat_completion(MESSAGES, temperature=0, max_tokens=100).choices[0].message.content == HELLO_BACK
    named = CLIENT.chat.completions.create(MESSAGES, model=MODEL, temperature=0)
    assert named.choices[0].message.content == HELLO_BACK


def chat_streamed() -> None:
    chunks = [*CLIENT.chat_completion(MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO_BACK
    assert chunks[-1].usage.completion_tokens > 0


async def chat_async() -> None:
    async with AsyncInferenceClient(base_url=BASE_URL, api_key=KEY) as client:
        stream = await client.chat_completion(MESSAGES, temperature=0, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == HELLO_BACK


def image() -> None:
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": WHAT}]
    answer = CLIENT.chat_completion([{"role": "user", "content": parts}], temperature=0)
    assert answer.choices[0].message.content == RED_SQUARE


def tool_left_to_the_model() -> None:
    answer = CLIENT.chat_completion(MESSAGES, tools=[TOOL], tool_choice="auto", max_tokens=8)
    assert answer.choices[0].message.content


def tool_called() -> None:
    for choice in ("required", NAMED):
        answer = CLIENT.chat_completion(MESSAGES, tools=[TOOL], tool_choice=choice)
        assert answer.choices[0].message.tool_calls
        for call in answer.choices[0].message.tool_calls:
            check_weather(call.function.arguments)


def tool_called_streamed() -> None:
    chunks = [*CLIENT.chat_completion(MESSAGES, tools=[TOOL], tool_choice=NAMED, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "get_weather"
    check_weather("".join(delta.function.arguments or "" for delta in deltas))


def tool_result() -> None:
    message = CLIENT.chat_completion(MESSAGES, tools=[TOOL], tool_choice=NAMED).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in message.tool_calls]
    turns = [*MESSAGES, message, *results]
    assert CLIENT.chat_completion(turns, tools=[TOOL], max_tokens=8).choices[0].message.content


def structured() -> None:
    for form in (SCHEMA, {"type": "json", "value": WEATHER}):
        answer = CLIENT.chat_completion(MESSAGES, response_format=form)
        check_weather(answer.choices[0].message.content)
        chunks = [*CLIENT.chat_completion(MESSAGES, response_format=form, stream=True)]
        check_weather("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    answer = CLIENT.chat_completion(MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=64)
    assert json.loads(answer.choices[0].message.content) == {}


report(globals())
