"""Scenarios of instructor: structured answers in each of its modes for OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pydantic
from instructor.core import InstructorRetryException
from scenarios import AUDIO_FILE, BASE_URL, HELLO, HOW_MANY, IMAGE_FILE, KEY, MODEL, WHAT, report

CLIENT = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
TOOLS = instructor.from_openai(CLIENT, mode=instructor.Mode.TOOLS)
ASK: Any = {"model": MODEL, "temperature": 0, "max_retries": 0, "messages": [{"role": "user", "content": HELLO}]}


class Thing(pydantic.BaseModel):
    """A structured answer."""

    color: Literal["red", "blue"]
    sides: Literal[3, 4] | None


class Anything(pydantic.BaseModel, extra="allow"):
    """Any JSON object."""


def tools() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(CLIENT, mode=mode)
        assert isinstance(client.chat.completions.create(**ASK, response_model=Thing), Thing)


def json_schema() -> None:
    client = instructor.from_openai(CLIENT, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.chat.completions.create(**ASK, response_model=Thing), Thing)


def json_object() -> None:
    # The client asks for any JSON object, and small models do not follow the schema in the prompt.
    client = instructor.from_openai(CLIENT, mode=instructor.Mode.JSON)
    assert isinstance(client.chat.completions.create(**ASK, response_model=Anything, max_tokens=300), Anything)


async def asynchronous() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY))
    assert isinstance(await client.chat.completions.create(**ASK, response_model=Thing), Thing)


def partial_streamed() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(CLIENT, mode=mode)
        found = [*client.chat.completions.create_partial(**ASK, response_model=Thing)]
        assert len(found) > 1
        Thing.model_validate(found[-1].model_dump())


def image() -> None:
    parts = [WHAT, instructor.Image.from_path(IMAGE_FILE)]
    asked = ASK | {"messages": [{"role": "user", "content": parts}]}
    assert isinstance(TOOLS.chat.completions.create(**asked, response_model=Thing), Thing)


def audio() -> None:
    parts = [HOW_MANY, instructor.Audio.from_path(AUDIO_FILE)]
    asked = ASK | {"messages": [{"role": "user", "content": parts}]}
    assert isinstance(TOOLS.chat.completions.create(**asked, response_model=Thing), Thing)


def retries_send_the_call_back() -> None:
    class Never(pydantic.BaseModel):
        """An answer that the client always refuses."""

        color: Literal["red", "blue"]

        @pydantic.field_validator("color")
        @classmethod
        def refuse(cls, value: str) -> str:
            raise ValueError(f"not {value}")

    requests: list[Any] = []
    TOOLS.on("completion:kwargs", lambda *_, **given: requests.append(given))
    error: Exception | None = None
    try:
        TOOLS.chat.completions.create(**ASK | {"max_retries": 1}, response_model=Never)
    except InstructorRetryException as raised:
        error = raised
    assert error is not None
    assert "not " in str(error)
    assert len(requests) == 2
    assert "tool" in {message["role"] for message in requests[1]["messages"]}


report(globals())
