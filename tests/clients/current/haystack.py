"""Scenarios of Haystack: the chat generator for OpenAI's API, and an agent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, Document, FileContent, ImageContent
from haystack.tools import tool
from haystack.utils import Secret
from scenarios import (
    BASE_URL,
    HELLO,
    HELLO_BACK,
    IMAGE_FILE,
    KEY,
    MODEL,
    PDF_FILE,
    RED_SQUARE,
    WHAT,
    check_weather,
    report,
)

MESSAGES = [ChatMessage.from_user(HELLO)]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Thing(pydantic.BaseModel):
    """A structured answer."""

    color: Literal["red", "blue"]
    sides: Literal[3, 4] | None


@tool
def get_weather(
    city: Annotated[Literal["Oslo", "Rome"], "The city"], days: Annotated[Literal[1, 2, 3], "Number of days"]
) -> str:
    """Return the weather."""
    return f"Sunny in {city} for {days} days."


def _generator(**given: Any) -> OpenAIChatGenerator:
    settings = {"temperature": 0} | given.pop("settings", {})
    return OpenAIChatGenerator(
        api_key=Secret.from_token(KEY),
        model=MODEL,
        api_base_url=BASE_URL,
        generation_kwargs=settings,
        max_retries=0,
        **given,
    )


def chat() -> None:
    (reply,) = _generator().run(MESSAGES)["replies"]
    assert reply.text == HELLO_BACK
    assert reply.meta["usage"]["completion_tokens"] > 0


def chat_streamed() -> None:
    pieces: list[str] = []
    (reply,) = _generator(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(MESSAGES)["replies"]
    assert "".join(pieces) == reply.text == HELLO_BACK
    assert len(pieces) > 1


async def chat_async() -> None:
    assert (await _generator().run_async(MESSAGES))["replies"][0].text == HELLO_BACK


def image() -> None:
    message = ChatMessage.from_user(content_parts=[ImageContent.from_file_path(IMAGE_FILE), WHAT])
    assert _generator().run([message])["replies"][0].text == RED_SQUARE


def pdf() -> None:
    message = ChatMessage.from_user(content_parts=[FileContent.from_file_path(PDF_FILE), WHAT])
    assert _generator().run([message])["replies"][0].text == RED_SQUARE


def tool_left_to_the_model() -> None:
    assert _generator(tools=[get_weather], settings={"max_tokens": 8}).run(MESSAGES)["replies"][0].text


def tool_called() -> None:
    for choice in ("required", NAMED):
        for strict in (False, True):
            made = _generator(tools=[get_weather], tools_strict=strict, settings={"tool_choice": choice})
            (reply,) = made.run(MESSAGES)["replies"]
            assert reply.tool_calls
            assert reply.meta["finish_reason"] == "tool_calls"
            for call in reply.tool_calls:
                check_weather(call.arguments)


def tool_called_streamed() -> None:
    for choice in ("required", NAMED):
        made = _generator(tools=[get_weather], settings={"tool_choice": choice}, streaming_callback=lambda _: None)
        (reply,) = made.run(MESSAGES)["replies"]
        assert reply.tool_calls
        for call in reply.tool_calls:
            check_weather(call.arguments)


def tool_result() -> None:
    (reply,) = _generator(tools=[get_weather], settings={"tool_choice": "required"}).run(MESSAGES)["replies"]
    results = [ChatMessage.from_tool("Sunny.", origin=call) for call in reply.tool_calls]
    made = _generator(tools=[get_weather], settings={"max_tokens": 8})
    assert made.run([*MESSAGES, reply, *results])["replies"][0].text


def structured() -> None:
    (reply,) = _generator(settings={"response_format": Thing}).run(MESSAGES)["replies"]
    Thing.model_validate_json(reply.text)


def structured_streamed() -> None:
    # In a stream, the client accepts a JSON schema but no class.
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": Thing.model_json_schema()}}
    made = _generator(settings={"response_format": form}, streaming_callback=lambda _: None)
    Thing.model_validate_json(made.run(MESSAGES)["replies"][0].text)


def agent() -> None:
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    made = Agent(chat_generator=_generator(settings=settings), tools=[get_weather], exit_conditions=["get_weather"])
    messages = made.run(messages=MESSAGES)["messages"]
    assert "Sunny" in messages[-1].tool_call_result.result


def _responses(**given: Any) -> OpenAIResponsesChatGenerator:
    settings = {"temperature": 0, "max_output_tokens": 300} | given.pop("settings", {})
    server = {"api_key": Secret.from_token(KEY), "model": MODEL, "api_base_url": BASE_URL, "max_retries": 0}
    return OpenAIResponsesChatGenerator(generation_kwargs=settings, **server, **given)


def responses() -> None:
    (reply,) = _responses().run(MESSAGES)["replies"]
    assert reply.text == HELLO_BACK


def responses_streamed() -> None:
    pieces: list[str] = []
    (reply,) = _responses(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(MESSAGES)["replies"]
    assert "".join(pieces) == reply.text == HELLO_BACK


def responses_to_an_image() -> None:
    message = ChatMessage.from_user(content_parts=[ImageContent.from_file_path(IMAGE_FILE), WHAT])
    assert _responses().run([message])["replies"][0].text == RED_SQUARE


def responses_with_a_tool() -> None:
    (reply,) = _responses(tools=[get_weather], settings={"tool_choice": "required"}).run(MESSAGES)["replies"]
    assert reply.tool_calls
    for call in reply.tool_calls:
        check_weather(call.arguments)
    results = [ChatMessage.from_tool("Sunny.", origin=call) for call in reply.tool_calls]
    made = _responses(tools=[get_weather], settings={"max_output_tokens": 16})
    assert made.run([*MESSAGES, reply, *results])["replies"][0].text


def embeddings() -> None:
    server: Any = {"api_key": Secret.from_token(KEY), "model": MODEL, "api_base_url": BASE_URL}
    vector = OpenAITextEmbedder(**server).run(HELLO)["embedding"]
    (document,) = OpenAIDocumentEmbedder(**server, progress_bar=False).run([Document(content=HELLO)])["documents"]
    assert max(abs(a - b) for a, b in zip(vector, document.embedding, strict=True)) < 1e-5


report(globals())
