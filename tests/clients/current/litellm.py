"""Scenarios of litellm: the service is configured as a server with OpenAI's API, and as a hosted vLLM."""

from __future__ import annotations

import os
from typing import Any, Literal

import pydantic
from scenarios import (
    AUDIO,
    AUDIO_FILE,
    BASE_URL,
    HELLO,
    HELLO_BACK,
    HOW_MANY,
    IMAGE,
    KEY,
    MODEL,
    PDF,
    RED_SQUARE,
    THREE,
    URL,
    WEATHER,
    WHAT,
    check_weather,
    report,
)

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not download the map
import litellm

PROVIDERS = ("openai", "hosted_vllm")
MESSAGES: Any = [{"role": "user", "content": HELLO}]
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
CHOICES = ("required", NAMED)
litellm.suppress_debug_info = True


class Thing(pydantic.BaseModel):
    """A structured answer."""

    color: Literal["red", "blue"]
    sides: Literal[3, 4] | None


def _ask(provider: str, messages: Any = MESSAGES, **given: Any) -> Any:
    server = {"api_base": BASE_URL, "api_key": KEY, "num_retries": 0}
    return litellm.completion(f"{provider}/{MODEL}", messages, temperature=0, **server, **given)


def chat() -> None:
    for provider in PROVIDERS:
        answer = _ask(provider)
        assert answer.choices[0].message.content == HELLO_BACK
        assert answer.usage.completion_tokens > 0


def chat_streamed() -> None:
    for provider in PROVIDERS:
        chunks = [*_ask(provider, stream=True, stream_options={"include_usage": True})]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO_BACK
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 0


async def chat_async() -> None:
    answer = await litellm.acompletion(f"openai/{MODEL}", MESSAGES, api_base=BASE_URL, api_key=KEY, temperature=0)
    assert answer.choices[0].message.content == HELLO_BACK


def image() -> None:
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": WHAT}]
    for provider in PROVIDERS:
        answer = _ask(provider, [{"role": "user", "content": parts}])
        assert answer.choices[0].message.content == RED_SQUARE


def pdf() -> None:
    file = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}"}}
    parts = [file, {"type": "text", "text": WHAT}]
    assert _ask("openai", [{"role": "user", "content": parts}]).choices[0].message.content == RED_SQUARE


def audio() -> None:
    heard = {"type": "input_audio", "input_audio": {"data": AUDIO, "format": "wav"}}
    parts = [heard, {"type": "text", "text": HOW_MANY}]
    for provider in PROVIDERS:
        assert _ask(provider, [{"role": "user", "content": parts}]).choices[0].message.content == THREE


def tool_left_to_the_model() -> None:
    for provider in PROVIDERS:
        assert _ask(provider, tools=[TOOL], tool_choice="auto", max_tokens=8).choices[0].message.content


def tool_called() -> None:
    for provider in PROVIDERS:
        for choice in CHOICES:
            answer = _ask(provider, tools=[TOOL], tool_choice=choice)
            assert answer.choices[0].finish_reason == "tool_calls"
            for call in answer.choices[0].message.tool_calls:
                check_weather(call.function.arguments)


def tool_called_streamed() -> None:
    for choice in CHOICES:
        answer = litellm.stream_chunk_builder([*_ask("openai", tools=[TOOL], tool_choice=choice, stream=True)])
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in answer.choices[0].message.tool_calls:
            check_weather(call.function.arguments)


def tool_result() -> None:
    for provider in PROVIDERS:
        message = _ask(provider, tools=[TOOL], tool_choice=NAMED).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in message.tool_calls]
        assert _ask(provider, [*MESSAGES, message, *results], tools=[TOOL], max_tokens=8).choices[0].message.content


def structured() -> None:
    for provider in PROVIDERS:
        Thing.model_validate_json(_ask(provider, response_format=Thing).choices[0].message.content)
        assert _ask(provider, response_format={"type": "json_object"}, max_tokens=16).choices[0].message.content


def structured_streamed() -> None:
    answer = litellm.stream_chunk_builder([*_ask("openai", response_format=Thing, stream=True)])
    Thing.model_validate_json(answer.choices[0].message.content)


def responses() -> None:
    answer: Any = litellm.responses(HELLO, f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, temperature=0)
    assert answer.output_text == HELLO_BACK
    again: Any = litellm.responses(
        WHAT, f"openai/{MODEL}", previous_response_id=answer.id, api_base=BASE_URL, api_key=KEY, max_output_tokens=8
    )
    assert again.output_text


def responses_streamed() -> None:
    server: Any = {"api_base": BASE_URL, "api_key": KEY, "temperature": 0}
    events: list[Any] = [*litellm.responses(HELLO, f"openai/{MODEL}", stream=True, **server)]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == HELLO_BACK
    assert events[-1].type == "response.completed"


async def messages() -> None:
    """A stream would need fastapi, which litellm requires only for its proxy."""
    server: Any = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 300}
    answer: Any = await litellm.anthropic_messages(messages=MESSAGES, model=f"anthropic/{MODEL}", **server)
    assert answer["content"][0]["text"] == HELLO_BACK


def embeddings() -> None:
    for provider in PROVIDERS:
        answer = litellm.embedding(f"{provider}/{MODEL}", [HELLO, WHAT], api_base=BASE_URL, api_key=KEY)
        assert [one["index"] for one in answer.data] == [0, 1]


def rerank() -> None:
    answer: Any = litellm.rerank(
        f"hosted_vllm/{MODEL}", HELLO, [WHAT, HELLO], api_base=BASE_URL, api_key=KEY, return_documents=True
    )
    assert answer.results[0]["index"] == 1, "a text is most similar to itself"


def transcription() -> None:
    for provider in PROVIDERS:
        with AUDIO_FILE.open("rb") as file:
            transcript = litellm.transcription(
                model=f"{provider}/{MODEL}", file=file, language="en", api_base=BASE_URL, api_key=KEY
            )
        assert transcript.text


report(globals())
