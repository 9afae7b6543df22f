"""Scenarios of pydantic-ai: agents that use its chat model for OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
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
    report,
)

MODEL_OF_CHAT = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
GREEDY: Any = {"temperature": 0}


class Thing(pydantic.BaseModel):
    """A structured answer."""

    color: Literal["red", "blue"]
    sides: Literal[3, 4] | None


class Anything(pydantic.BaseModel, extra="allow"):
    """Any JSON object."""


def _agent(**given: Any) -> Agent[None, Any]:
    return Agent(MODEL_OF_CHAT, model_settings=GREEDY, **given)


def chat() -> None:
    result = _agent().run_sync(HELLO)
    assert result.output == HELLO_BACK
    assert result.usage.output_tokens > 0


async def chat_streamed() -> None:
    async with _agent().run_stream(HELLO) as result:
        pieces = [text async for text in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == HELLO_BACK
    assert len(pieces) > 1


async def image() -> None:
    prompt = [BinaryContent(IMAGE_FILE.read_bytes(), media_type="image/png"), WHAT]
    assert (await _agent().run(prompt)).output == RED_SQUARE
    async with _agent().run_stream(prompt) as result:
        assert await result.get_output() == RED_SQUARE


async def pdf() -> None:
    prompt = [BinaryContent(PDF_FILE.read_bytes(), media_type="application/pdf"), WHAT]
    assert (await _agent().run(prompt)).output == RED_SQUARE


async def audio() -> None:
    prompt = [BinaryContent(AUDIO_FILE.read_bytes(), media_type="audio/wav"), HOW_MANY]
    assert (await _agent().run(prompt)).output == THREE


async def file() -> None:
    prompt = [BinaryContent(b"Some notes.", media_type="text/plain"), WHAT]
    assert (await _agent().run(prompt)).output


def _with_tool(**given: Any) -> tuple[Agent[None, Any], list[str]]:
    agent, seen = _agent(**given), []

    @agent.tool_plain
    def get_weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Return the weather."""
        seen.append(city)
        return f"Sunny in {city} for {days} days."

    return agent, seen


async def tool_left_to_the_model() -> None:
    agent, _ = _with_tool()
    short = GREEDY | {"max_tokens": 32}
    assert (await agent.run(HELLO, model_settings=short)).output
    async with agent.run_stream(HELLO, model_settings=short) as result:
        assert await result.get_output()


async def structured() -> None:
    for kind in (Thing, ToolOutput(Thing, strict=True), NativeOutput(Thing), NativeOutput(Thing, strict=True)):
        assert isinstance((await _agent(output_type=kind).run(HELLO)).output, Thing)


async def structured_streamed() -> None:
    for kind in (Thing, NativeOutput(Thing)):
        async with _agent(output_type=kind).run_stream(HELLO) as result:
            outputs = [output async for output in result.stream_output(debounce_by=None)]
        assert isinstance(outputs[-1], Thing)


async def structured_by_prompt() -> None:
    # The client asks for any JSON object, and small models do not follow the schema in the prompt.
    assert isinstance((await _agent(output_type=PromptedOutput(Anything)).run(HELLO)).output, Anything)


async def tools_and_structured_answer() -> None:
    agent, _ = _with_tool(output_type=Thing)
    assert isinstance((await agent.run(HELLO)).output, Thing)


def _call_first(context: RunContext) -> Any:
    """Require a call on the first turn. On later turns, the model decides."""
    return GREEDY | ({"tool_choice": "required"} if context.run_step == 1 else {"max_tokens": 32})


async def tool_called_and_result() -> None:
    agent, seen = _with_tool()
    result = await agent.run(HELLO, model_settings=_call_first)
    assert seen
    assert result.output
    # The next question sends the calls and results again.
    assert (await agent.run("Thanks", message_history=result.all_messages(), model_settings={"max_tokens": 32})).output


async def tool_called_and_result_streamed() -> None:
    agent, seen = _with_tool()
    async with agent.run_stream(HELLO, model_settings=_call_first) as result:
        assert await result.get_output()
    assert seen


async def tool_result_with_an_image() -> None:
    agent = _agent()

    @agent.tool_plain
    def screenshot() -> BinaryContent:
        """Return an image."""
        return BinaryContent(IMAGE_FILE.read_bytes(), media_type="image/png")

    assert (await agent.run(HELLO, model_settings=_call_first)).output


report(globals())
