"""Scenarios of openai-agents, with its model for chat completions and its default model, for responses."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
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
    report,
)

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
MODEL_OF_CHAT = OpenAIChatCompletionsModel(MODEL, CLIENT)
MODEL_OF_RESPONSES = OpenAIResponsesModel(MODEL, CLIENT)
SEEN: list[str] = []


class Thing(pydantic.BaseModel):
    """A structured answer."""

    color: Literal["red", "blue"]
    sides: Literal[3, 4] | None


@function_tool
def get_weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Return the weather."""
    SEEN.append(city)
    return f"Sunny in {city} for {days} days."


def _agent(settings: dict[str, Any] | None = None, **given: Any) -> Agent[None]:
    made = ModelSettings(temperature=0, include_usage=True, **{"max_tokens": 300} | (settings or {}))
    return Agent(**{"name": "Agent", "model": MODEL_OF_CHAT, "model_settings": made, **given})


async def chat() -> None:
    result = await Runner.run(_agent(), HELLO)
    assert result.final_output == HELLO_BACK
    assert result.context_wrapper.usage.output_tokens > 0


async def chat_streamed() -> None:
    result = Runner.run_streamed(_agent(), HELLO)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    assert "".join(pieces) == result.final_output == HELLO_BACK
    assert len(pieces) > 1


async def image() -> None:
    parts: Any = [{"type": "input_image", "image_url": IMAGE, "detail": "auto"}, {"type": "input_text", "text": WHAT}]
    result = await Runner.run(_agent(), [{"role": "user", "content": parts}])
    assert result.final_output == RED_SQUARE


async def pdf() -> None:
    file = {"type": "input_file", "filename": "red_square.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
    parts: Any = [file, {"type": "input_text", "text": WHAT}]
    assert (await Runner.run(_agent(), [{"role": "user", "content": parts}])).final_output == RED_SQUARE


async def audio() -> None:
    heard = {"type": "input_audio", "input_audio": {"data": AUDIO, "format": "wav"}}
    parts: Any = [heard, {"type": "input_text", "text": HOW_MANY}]
    assert (await Runner.run(_agent(), [{"role": "user", "content": parts}])).final_output == THREE


async def tool_left_to_the_model() -> None:
    assert (await Runner.run(_agent({"max_tokens": 16}, tools=[get_weather], instructions="Help."), HELLO)).final_output


async def tool_called_and_result() -> None:
    for choice in ("required", "get_weather"):
        SEEN.clear()
        # After the first call, the client sets tool_choice to auto.
        agent = _agent({"tool_choice": choice, "parallel_tool_calls": False}, tools=[get_weather])
        result = await Runner.run(agent, HELLO)
        assert len(SEEN) == 1
        assert result.final_output
        # The next question sends the call and its result again.
        turns: Any = [*result.to_input_list(), {"role": "user", "content": "Thanks"}]
        assert (await Runner.run(_agent({"max_tokens": 16}, tools=[get_weather]), turns)).final_output


async def tool_called_and_result_streamed() -> None:
    SEEN.clear()
    result = Runner.run_streamed(_agent({"tool_choice": "required"}, tools=[get_weather]), HELLO)
    items = [event.item.type async for event in result.stream_events() if event.type == "run_item_stream_event"]
    assert {"tool_call_item", "tool_call_output_item", "message_output_item"} <= {*items}
    assert SEEN


async def handoff() -> None:
    other = _agent(handoff_description="Greets.")
    result = await Runner.run(_agent({"tool_choice": "required"}, handoffs=[other]), HELLO)
    assert result.final_output
    assert result.last_agent is other


async def structured() -> None:
    for strict in (True, False):
        agent = _agent(output_type=AgentOutputSchema(Thing, strict_json_schema=strict))
        assert isinstance((await Runner.run(agent, HELLO)).final_output, Thing)


async def structured_streamed() -> None:
    result = Runner.run_streamed(_agent(output_type=Thing), HELLO)
    assert [event async for event in result.stream_events()]
    assert isinstance(result.final_output, Thing)


async def responses() -> None:
    assert (await Runner.run(_agent(model=MODEL_OF_RESPONSES), HELLO)).final_output == HELLO_BACK
    result = Runner.run_streamed(_agent(model=MODEL_OF_RESPONSES), HELLO)
    assert [event async for event in result.stream_events()]
    assert result.final_output == HELLO_BACK


async def responses_tool_called_and_result() -> None:
    for choice in ("required", "get_weather"):
        SEEN.clear()
        settings = {"tool_choice": choice, "parallel_tool_calls": False}
        agent = _agent(settings, model=MODEL_OF_RESPONSES, tools=[get_weather])
        result = await Runner.run(agent, HELLO)
        assert len(SEEN) == 1
        turns: Any = [*result.to_input_list(), {"role": "user", "content": "Thanks"}]
        agent = _agent({"max_tokens": 16}, model=MODEL_OF_RESPONSES, tools=[get_weather])
        assert (await Runner.run(agent, turns)).final_output


async def responses_by_id() -> None:
    agent = _agent(model=MODEL_OF_RESPONSES)
    first = await Runner.run(agent, HELLO)
    second = await Runner.run(agent, "Thanks", previous_response_id=first.last_response_id)
    assert second.final_output


async def responses_structured() -> None:
    agent = _agent(model=MODEL_OF_RESPONSES, output_type=Thing)
    assert isinstance((await Runner.run(agent, HELLO)).final_output, Thing)


report(globals())
