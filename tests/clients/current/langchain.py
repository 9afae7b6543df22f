"""Scenarios of LangChain: ChatOpenAI with tools and structured outputs, and an agent."""

from __future__ import annotations

import base64
from typing import Any, Literal

import pydantic
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from scenarios import (
    AUDIO,
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
    WHAT,
    check_weather,
    report,
)

MODEL_OF_CHAT = ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, temperature=0, max_retries=0)


class Thing(pydantic.BaseModel):
    """A structured answer."""

    color: Literal["red", "blue"]
    sides: Literal[3, 4] | None


@tool
def get_weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Return the weather."""
    return f"Sunny in {city} for {days} days."


def chat() -> None:
    answer = MODEL_OF_CHAT.invoke(HELLO)
    assert answer.content == HELLO_BACK
    assert answer.usage_metadata["output_tokens"] > 0


def chat_streamed() -> None:
    chunks = list(MODEL_OF_CHAT.stream([SystemMessage(""), HumanMessage(HELLO)], stream_usage=True))
    assert "".join(chunk.content for chunk in chunks)
    assert len(chunks) > 3
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


async def chat_async() -> None:
    assert "".join([chunk.content async for chunk in MODEL_OF_CHAT.astream(HELLO)]) == HELLO_BACK


def batch() -> None:
    assert [answer.content for answer in MODEL_OF_CHAT.batch([HELLO, HELLO])] == [HELLO_BACK] * 2


def image() -> None:
    openai_form = {"type": "image_url", "image_url": {"url": IMAGE}}
    own_form = {"type": "image", "base64": IMAGE.partition(",")[2], "mime_type": "image/png"}
    for part in (openai_form, own_form):
        message = HumanMessage([part, {"type": "text", "text": WHAT}])
        assert MODEL_OF_CHAT.invoke([message]).content == RED_SQUARE
        assert "".join(chunk.content for chunk in MODEL_OF_CHAT.stream([message])) == RED_SQUARE


def pdf() -> None:
    part = {"type": "file", "base64": PDF, "mime_type": "application/pdf", "filename": "red_square.pdf"}
    assert MODEL_OF_CHAT.invoke([HumanMessage([part, {"type": "text", "text": WHAT}])]).content == RED_SQUARE


def audio() -> None:
    part = {"type": "audio", "base64": AUDIO, "mime_type": "audio/wav"}
    assert MODEL_OF_CHAT.invoke([HumanMessage([part, {"type": "text", "text": HOW_MANY}])]).content == THREE


def file() -> None:
    data = base64.b64encode(b"Some notes.").decode()
    part = {"type": "file", "base64": data, "mime_type": "text/plain", "filename": "notes.txt"}
    assert MODEL_OF_CHAT.bind(max_tokens=8).invoke([HumanMessage([part, {"type": "text", "text": WHAT}])]).content


def tool_left_to_the_model() -> None:
    bound = MODEL_OF_CHAT.bind_tools([get_weather], max_tokens=32)
    assert bound.invoke(HELLO).content
    assert "".join(chunk.content for chunk in bound.stream(HELLO))


def tool_called() -> None:
    for choice, strict in (("any", True), ("required", None), ("get_weather", None), (True, None)):
        answer = MODEL_OF_CHAT.bind_tools([get_weather], tool_choice=choice, strict=strict).invoke(HELLO)
        assert answer.tool_calls
        assert not answer.invalid_tool_calls
        for call in answer.tool_calls:
            check_weather(call["args"])


def tool_called_streamed() -> None:
    for choice in ("any", "get_weather"):
        chunks = list(MODEL_OF_CHAT.bind_tools([get_weather], tool_choice=choice).stream(HELLO))
        answer: Any = chunks[0]
        for chunk in chunks[1:]:
            answer += chunk
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        assert answer.tool_calls
        for call in answer.tool_calls:
            check_weather(call["args"])


def tool_result() -> None:
    call = MODEL_OF_CHAT.bind_tools([get_weather], tool_choice="any").invoke(HELLO)
    assert isinstance(call, AIMessage)
    results = [get_weather.invoke(one) for one in call.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    bound = MODEL_OF_CHAT.bind_tools([get_weather], max_tokens=32)
    assert bound.invoke([HumanMessage(HELLO), call, *results]).content
    assert "".join(chunk.content for chunk in bound.stream([HumanMessage(HELLO), call, *results]))


def tool_result_with_an_image() -> None:
    call = AIMessage("", tool_calls=[{"name": "screenshot", "args": {}, "id": "call_1"}])
    part = {"type": "image", "base64": IMAGE.partition(",")[2], "mime_type": "image/png"}
    turns = [HumanMessage(HELLO), call, ToolMessage([part], tool_call_id="call_1")]
    assert MODEL_OF_CHAT.bind(max_tokens=8).invoke(turns).content


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            assert isinstance(
                MODEL_OF_CHAT.with_structured_output(Thing, method=method, strict=strict).invoke(HELLO), Thing
            )
    assert isinstance(
        MODEL_OF_CHAT.bind(response_format={"type": "json_object"}, max_tokens=16).invoke(HELLO).content, str
    )


def structured_streamed() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance([*MODEL_OF_CHAT.with_structured_output(Thing, method=method).stream(HELLO)][-1], Thing)


def structured_with_tools() -> None:
    answer = MODEL_OF_CHAT.bind_tools([get_weather], strict=True, response_format=Thing).invoke(HELLO)
    assert answer.tool_calls or isinstance(answer.additional_kwargs["parsed"], Thing)


@wrap_model_call
def _call_first(request: ModelRequest, handler: Any) -> Any:
    """Require a call on the first turn. On later turns, the model decides."""
    first = not any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="any") if first else request)


def agent() -> None:
    made = create_agent(MODEL_OF_CHAT, [get_weather], system_prompt="Help.", middleware=[_call_first])
    messages = made.invoke({"messages": [HumanMessage(HELLO)]})["messages"]
    assert any(isinstance(message, ToolMessage) and "Sunny" in message.content for message in messages)
    assert messages[-1].content
    steps = list(made.stream({"messages": [HumanMessage(HELLO)]}, stream_mode="messages"))
    assert any(isinstance(chunk, ToolMessage) for chunk, _ in steps)


def agent_with_structured_answer() -> None:
    made = create_agent(MODEL_OF_CHAT, [], response_format=Thing)
    assert isinstance(made.invoke({"messages": [HumanMessage(HELLO)]})["structured_response"], Thing)


report(globals())
