"""Scenarios of smolagents: the model for OpenAI's API, and both kinds of agents."""

from __future__ import annotations

from typing import Any, ClassVar

from PIL import Image
from scenarios import (
    BASE_URL,
    HELLO,
    HELLO_BACK,
    IMAGE_FILE,
    KEY,
    MODEL,
    RED_SQUARE,
    WEATHER,
    WHAT,
    check_weather,
    report,
)
from smolagents import CodeAgent, OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import MessageRole, agglomerate_stream_deltas

MODEL_OF_CHAT = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=KEY, temperature=0)
SHORT = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=KEY, temperature=0, max_tokens=80)


class GetWeather(Tool):
    """A tool with arguments from short lists."""

    name = "get_weather"
    description = "Return the weather."
    inputs: ClassVar[dict[str, Any]] = {
        name: schema | {"description": name} for name, schema in WEATHER["properties"].items()
    }
    output_type = "string"

    def forward(self, city: str, days: int) -> str:
        """Return the weather."""
        return f"Sunny in {city} for {days} days."


def _messages(text: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def chat() -> None:
    answer = MODEL_OF_CHAT.generate(_messages(HELLO))
    assert answer.content == HELLO_BACK
    assert answer.token_usage.output_tokens > 0


def chat_streamed() -> None:
    deltas = [*MODEL_OF_CHAT.generate_stream(_messages(HELLO))]
    assert "".join(delta.content or "" for delta in deltas) == HELLO_BACK
    assert len(deltas) > 3


def image() -> None:
    parts = [{"type": "image", "image": Image.open(IMAGE_FILE)}, {"type": "text", "text": WHAT}]
    assert MODEL_OF_CHAT.generate([{"role": "user", "content": parts}]).content == RED_SQUARE


def tool_called() -> None:
    answer = MODEL_OF_CHAT.generate(_messages(HELLO), tools_to_call_from=[GetWeather()])
    assert answer.tool_calls
    for call in answer.tool_calls:
        check_weather(call.function.arguments)


def tool_called_streamed() -> None:
    deltas = [*MODEL_OF_CHAT.generate_stream(_messages(HELLO), tools_to_call_from=[GetWeather()])]
    answer = agglomerate_stream_deltas(deltas)
    assert answer.tool_calls
    for call in answer.tool_calls:
        check_weather(call.function.arguments)


def tool_result() -> None:
    message = MODEL_OF_CHAT.generate(_messages(HELLO), tools_to_call_from=[GetWeather()])
    # An agent stores calls and results as text, in messages with these roles.
    turns = [
        *_messages(HELLO),
        {"role": MessageRole.TOOL_CALL, "content": [{"type": "text", "text": f"Calling tools: {message.tool_calls}"}]},
        {"role": MessageRole.TOOL_RESPONSE, "content": [{"type": "text", "text": "Observation: Sunny."}]},
    ]
    assert SHORT.generate(turns, tools_to_call_from=[GetWeather()]).tool_calls


def structured() -> None:
    schema = {"name": "thing", "schema": WEATHER, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = MODEL_OF_CHAT.generate(_messages(HELLO), response_format=form)
    check_weather(answer.content)


def tool_calling_agent() -> None:
    for stream in (False, True):
        agent = ToolCallingAgent([GetWeather()], SHORT, max_steps=2, verbosity_level=0, stream_outputs=stream)
        agent.prompt_templates["system_prompt"] = "Help."
        agent.run(HELLO)
        assert any(step.get("tool_calls") for step in agent.memory.get_full_steps())


def code_agent() -> None:
    agent = CodeAgent([GetWeather()], SHORT, max_steps=1, verbosity_level=0, use_structured_outputs_internally=True)
    agent.prompt_templates["system_prompt"] = "Help."
    agent.run(HELLO)
    assert agent.memory.steps


report(globals())
