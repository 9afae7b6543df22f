"""Scenarios of LlamaIndex: OpenAILike with structured outputs, and an agent."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import AudioBlock, ChatMessage, DocumentBlock, ImageBlock, MessageRole, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from scenarios import (
    AUDIO_FILE,
    BASE_URL,
    HELLO,
    HELLO_BACK,
    HOW_MANY,
    IMAGE_FILE,
    KEY,
    MODEL,
    PDF_FILE,
    RED_SQUARE,
    THREE,
    WHAT,
    check_weather,
    report,
)

MESSAGES = [ChatMessage(HELLO)]


class Thing(pydantic.BaseModel):
    """A structured answer."""

    color: Literal["red", "blue"]
    sides: Literal[3, 4] | None


class Weather(pydantic.BaseModel):
    """The arguments of a tool."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def _get_weather(city: str, days: int) -> str:
    return f"Sunny in {city} for {days} days."


TOOL = FunctionTool.from_defaults(_get_weather, name="get_weather", description="Weather.", fn_schema=Weather)


def _llm(**given: Any) -> OpenAILike:
    settings: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0} | given
    return OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, max_retries=0, context_window=4096, **settings)


def chat() -> None:
    assert _llm().chat(MESSAGES).message.content == HELLO_BACK
    assert _llm().complete(HELLO).text == HELLO_BACK


def completion() -> None:
    assert _llm(is_chat_model=False, max_tokens=8).complete(HELLO).text


def chat_streamed() -> None:
    deltas = [*_llm().stream_chat(MESSAGES)]
    assert "".join(delta.delta or "" for delta in deltas) == deltas[-1].message.content == HELLO_BACK


async def chat_async() -> None:
    assert (await _llm().achat(MESSAGES)).message.content == HELLO_BACK


def image() -> None:
    message = ChatMessage(role=MessageRole.USER, blocks=[ImageBlock(path=IMAGE_FILE), TextBlock(text=WHAT)])
    assert _llm().chat([message]).message.content == RED_SQUARE


def pdf() -> None:
    blocks = [DocumentBlock(path=PDF_FILE, document_mimetype="application/pdf"), TextBlock(text=WHAT)]
    assert _llm().chat([ChatMessage(role=MessageRole.USER, blocks=blocks)]).message.content == RED_SQUARE


def audio() -> None:
    blocks = [AudioBlock(path=AUDIO_FILE, format="wav"), TextBlock(text=HOW_MANY)]
    assert _llm().chat([ChatMessage(role=MessageRole.USER, blocks=blocks)]).message.content == THREE


def tool_left_to_the_model() -> None:
    assert _llm(max_tokens=8).chat_with_tools([TOOL], HELLO).message.content


def tool_called() -> None:
    llm = _llm(max_tokens=600)
    for given in ({"tool_required": True}, {"tool_choice": "get_weather"}):
        for parallel in (False, True):
            answer = llm.chat_with_tools([TOOL], HELLO, allow_parallel_tool_calls=parallel, **given)
            calls = llm.get_tool_calls_from_response(answer)
            assert calls
            for call in calls:
                check_weather(call.tool_kwargs)


def tool_called_streamed() -> None:
    llm = _llm(max_tokens=600)
    answer = [*llm.stream_chat_with_tools([TOOL], HELLO, tool_required=True)][-1]
    calls = llm.get_tool_calls_from_response(answer)
    assert calls
    for call in calls:
        check_weather(call.tool_kwargs)


def tool_result() -> None:
    llm = _llm(max_tokens=100)
    answer = llm.chat_with_tools([TOOL], HELLO, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    results = [
        ChatMessage(role="tool", content="Sunny.", additional_kwargs={"tool_call_id": call.tool_id}) for call in calls
    ]
    history = [*MESSAGES, answer.message, *results]
    assert llm.chat_with_tools([TOOL], chat_history=history).message.content


def structured() -> None:
    for given in ({}, {"should_use_structured_outputs": True}):
        answer = _llm(**given).as_structured_llm(Thing).chat(MESSAGES)
        assert isinstance(answer.raw, Thing)


def structured_streamed() -> None:
    # If the client used tools in a stream, it would not require a call.
    structured = _llm(should_use_structured_outputs=True).as_structured_llm(Thing)
    answers = [*structured.stream_chat(MESSAGES)]
    assert len(answers) > 1
    Thing.model_validate_json(answers[-1].message.content)


async def agent() -> None:
    made = FunctionAgent(tools=[TOOL], llm=_llm(max_tokens=300), initial_tool_choice="get_weather")
    result = await made.run(HELLO)
    assert result.tool_calls
    assert str(result)


def _responses(**given: Any) -> OpenAIResponses:
    return OpenAIResponses(model=MODEL, api_base=BASE_URL, api_key=KEY, max_retries=0, temperature=0, **given)


def responses() -> None:
    assert _responses(context_window=4096).chat(MESSAGES).message.content == HELLO_BACK


def responses_streamed() -> None:
    deltas = [*_responses(context_window=4096).stream_chat(MESSAGES)]
    assert "".join(delta.delta or "" for delta in deltas) == HELLO_BACK


def embeddings() -> None:
    embed = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key=KEY, max_retries=0)
    (first, _), again = embed.get_text_embedding_batch([HELLO, WHAT]), embed.get_text_embedding(HELLO)
    assert max(abs(a - b) for a, b in zip(first, again, strict=True)) < 1e-5


report(globals())
