"""Scenarios of openai for Python."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any, Literal

import openai
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
    WEATHER,
    WHAT,
    check_weather,
    report,
)

CLIENT = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
CHAT: Any = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": HELLO}]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Thing(pydantic.BaseModel):
    """A structured answer."""

    color: Literal["red", "blue"]
    sides: int | None
    parts: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


class GetWeather(pydantic.BaseModel):
    """A tool with strict arguments."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def models() -> None:
    assert [model.id for model in CLIENT.models.list()] == [MODEL]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    answer = CLIENT.chat.completions.create(**CHAT)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (HELLO_BACK, "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def chat_streamed() -> None:
    with CLIENT.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    assert "".join(deltas) == answer.choices[0].message.content == HELLO_BACK
    assert len(deltas) > 3
    assert answer.usage.completion_tokens > 0


async def chat_async() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == HELLO_BACK


def completion() -> None:
    answer = CLIENT.completions.create(model=MODEL, prompt="Hello", max_tokens=4, temperature=0)
    stream = CLIENT.completions.create(model=MODEL, prompt="Hello", max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def transcription() -> None:
    with AUDIO_FILE.open("rb") as file:
        transcript = CLIENT.audio.transcriptions.create(model=MODEL, file=file, language="en", prompt=HOW_MANY)
    assert transcript.text
    assert transcript.usage.type == "tokens"
    assert transcript.usage.total_tokens == transcript.usage.input_tokens + transcript.usage.output_tokens
    with CLIENT.audio.transcriptions.create(
        model=MODEL, file=AUDIO_FILE, language="en", prompt=HOW_MANY, stream=True
    ) as stream:
        *deltas, last = stream
    assert "".join(event.delta for event in deltas) == last.text == transcript.text
    assert last.usage.total_tokens == transcript.usage.total_tokens


def transcription_formats() -> None:
    verbose = CLIENT.audio.transcriptions.create(model=MODEL, file=AUDIO_FILE, response_format="verbose_json")
    assert (verbose.segments[0].start, verbose.segments[-1].end) == (0, verbose.duration)
    for name, separator in (("srt", ","), ("vtt", ".")):
        subtitles = CLIENT.audio.transcriptions.create(model=MODEL, file=AUDIO_FILE, response_format=name)
        assert f"00:00:00{separator}000 --> " in subtitles
        assert verbose.text in subtitles
    message, words = "", {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    try:
        CLIENT.audio.transcriptions.create(model=MODEL, file=AUDIO_FILE, **words)
    except openai.BadRequestError as error:
        message = error.message
    assert "timestamp_granularities" in message


def translation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert CLIENT.audio.translations.create(model=MODEL, file=AUDIO_FILE).text


def image() -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": WHAT}]
    answer = CLIENT.chat.completions.create(**CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert answer.choices[0].message.content == RED_SQUARE


def pdf() -> None:
    file = {"filename": "red_square.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
    parts: Any = [{"type": "file", "file": file}, {"type": "text", "text": WHAT}]
    answer = CLIENT.chat.completions.create(**CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert answer.choices[0].message.content == RED_SQUARE


def audio() -> None:
    heard = {"type": "input_audio", "input_audio": {"data": AUDIO, "format": "wav"}}
    parts: Any = [heard, {"type": "text", "text": HOW_MANY}]
    answer = CLIENT.chat.completions.create(**CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert answer.choices[0].message.content == THREE


def log_probabilities_streamed() -> None:
    with CLIENT.chat.completions.stream(**CHAT, logprobs=True, top_logprobs=2) as stream:
        assert "logprobs.content.done" in {event.type for event in stream}
        tokens = stream.get_final_completion().choices[0].logprobs.content
    assert "".join(token.token for token in tokens).startswith(HELLO_BACK)


def tool_left_to_the_model() -> None:
    answer = CLIENT.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="auto", max_tokens=8)
    assert answer.choices[0].message.content
    with CLIENT.chat.completions.stream(**CHAT, tools=[TOOL]) as stream:
        assert stream.get_final_completion().choices[0].message.content


def tool_called() -> None:
    for choice in ("required", NAMED):
        answer = CLIENT.chat.completions.create(**CHAT, tools=[TOOL], tool_choice=choice)
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in answer.choices[0].message.tool_calls:
            assert call.function.name == "get_weather"
            check_weather(call.function.arguments)


def tool_called_streamed() -> None:
    for choice in ("required", NAMED):
        with CLIENT.chat.completions.stream(**CHAT, tools=[TOOL], tool_choice=choice) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in answer.choices[0].message.tool_calls:
            check_weather(call.function.arguments)


def tool_parsed() -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    answer = CLIENT.chat.completions.parse(**CHAT, tools=tools, tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetWeather)
    with CLIENT.chat.completions.stream(**CHAT, tools=tools, tool_choice="required") as stream:
        for call in stream.get_final_completion().choices[0].message.tool_calls:
            assert isinstance(call.function.parsed_arguments, GetWeather)


def tool_result() -> None:
    message = CLIENT.chat.completions.create(**CHAT, tools=[TOOL], tool_choice=NAMED).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in message.tool_calls]
    turns: Any = CHAT | {"messages": [*CHAT["messages"], message, *results], "max_tokens": 16}
    assert CLIENT.chat.completions.create(**turns, tools=[TOOL]).choices[0].message.content
    with CLIENT.chat.completions.stream(**turns | {"max_tokens": None}, tools=[TOOL]) as stream:
        assert stream.get_final_completion().choices[0].message.content


def structured() -> None:
    answer = CLIENT.chat.completions.parse(**CHAT, response_format=Thing)
    assert isinstance(answer.choices[0].message.parsed, Thing)


def structured_streamed() -> None:
    with CLIENT.chat.completions.stream(**CHAT, response_format=Thing) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Thing)


def embeddings() -> None:
    whole = CLIENT.embeddings.create(model=MODEL, input=[HELLO, WHAT])
    assert [one.index for one in whole.data] == [0, 1]
    for one in whole.data:
        assert abs(sum(value * value for value in one.embedding) - 1) < 1e-4
    short = CLIENT.embeddings.create(model=MODEL, input=HELLO, dimensions=16, encoding_format="float")
    assert len(short.data[0].embedding) == 16


def refusals_are_explained() -> None:
    message = ""
    try:
        CLIENT.chat.completions.create(**CHAT, extra_body={"num_beams": 2})
    except openai.BadRequestError as error:
        message = error.message
    assert "num_beams" in message


RESPONSE: Any = {"model": MODEL, "temperature": 0, "input": HELLO, "max_output_tokens": 300}
FUNCTION: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}


def response() -> None:
    answer = CLIENT.responses.create(**RESPONSE)
    assert (answer.output_text, answer.status) == (HELLO_BACK, "completed")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def response_streamed() -> None:
    with CLIENT.responses.stream(**RESPONSE) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert "".join(pieces) == answer.output_text == HELLO_BACK


def response_to_media() -> None:
    file = {"type": "input_file", "filename": "red_square.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
    heard = {"type": "input_audio", "input_audio": {"data": AUDIO, "format": "wav"}}
    cases: Any = (
        ({"type": "input_image", "image_url": IMAGE, "detail": "auto"}, WHAT, RED_SQUARE),
        (file, WHAT, RED_SQUARE),
        (heard, HOW_MANY, THREE),
    )
    for part, question, expected in cases:
        turn = {"role": "user", "content": [part, {"type": "input_text", "text": question}]}
        assert CLIENT.responses.create(**RESPONSE | {"input": [turn]}).output_text == expected


def response_with_tool() -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        given: Any = {"tools": [FUNCTION], "tool_choice": choice, "parallel_tool_calls": False}
        answer = CLIENT.responses.create(**RESPONSE, **given)
        with CLIENT.responses.stream(**RESPONSE, **given) as stream:
            streamed = stream.get_final_response()
        for (call,) in (answer.output, streamed.output):
            check_weather(call.arguments)
        result = {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "Sunny."}
        turns: Any = [{"role": "user", "content": HELLO}, *answer.output, result]
        short: Any = {"tools": [FUNCTION], "max_output_tokens": 16}
        assert CLIENT.responses.create(**RESPONSE | {"input": turns} | short).output_text
        following: Any = {"input": [result], "previous_response_id": answer.id}
        assert CLIENT.responses.create(**RESPONSE | following | short).output_text


def response_parsed() -> None:
    assert isinstance(CLIENT.responses.parse(**RESPONSE, text_format=Thing).output_parsed, Thing)


def response_stored() -> None:
    first = CLIENT.responses.create(**RESPONSE)
    second = CLIENT.responses.create(**RESPONSE, previous_response_id=first.id)
    assert CLIENT.responses.retrieve(second.id).output_text == second.output_text
    assert [item.type for item in CLIENT.responses.input_items.list(second.id, limit=1)] == ["message"] * 3
    CLIENT.responses.delete(first.id)
    try:
        CLIENT.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("the response was deleted")


def stored_files() -> None:
    file = CLIENT.files.create(file=("note.txt", b"A red circle."), purpose="user_data")
    assert CLIENT.files.retrieve(file.id).filename == "note.txt"
    assert CLIENT.files.content(file.id).read() == b"A red circle."
    assert file.id in [one.id for one in CLIENT.files.list(limit=1)]
    parts: Any = [{"type": "input_text", "text": HELLO}, {"type": "input_file", "file_id": file.id}]
    assert CLIENT.responses.create(**RESPONSE | {"input": [{"role": "user", "content": parts}]}).output_text
    assert CLIENT.files.delete(file.id).deleted


def batches() -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    file = CLIENT.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = CLIENT.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "a client"}
    )
    while batch.status in {"validating", "in_progress", "finalizing"}:
        time.sleep(0.1)
        batch = CLIENT.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.metadata) == ("completed", 1, {"of": "a client"})
    (answer,) = CLIENT.files.content(batch.output_file_id).text.splitlines()
    assert json.loads(answer)["response"]["body"]["choices"][0]["message"]["content"] == HELLO_BACK
    assert batch.id in [one.id for one in CLIENT.batches.list(limit=1)]
    try:
        CLIENT.batches.cancel(batch.id)
    except openai.BadRequestError:
        return
    raise AssertionError("the batch has ended")


report(globals())
