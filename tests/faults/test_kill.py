"""Tests that kill processes with SIGKILL at selected points. `make faults` kills them at all points."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from tests.warm import running_service
from tests.watching import metric, wait_until
from tools.fault_matrix import run
from tools.fault_points import POINTS, Point
from tools.fault_rig import CHAT, DEADLINE_S, Rig

SLICE = (
    "tokenizer.mid-fill",  # dies while it processes the request
    "decoder.at work",  # the item is decoded again
    "fork_server.forked",  # the engine that it has just forked answers
    "engine.attached",  # no output yet, so the request is sent again
    "engine.mid-decode",  # a request with output fails
    "api.everything",  # only the next service can free the memory
)
SLOW_SLICE = (
    "fork_server.starting",  # processes are spawned until the next one is ready
    "fork_server.at rest",  # the other processes continue
    "replica.attached",  # the other engine answers a request without output
    "replica.mid-decode",  # the other engine answers requests whose output the client has not seen
    "replica.starting",  # the other engine answers while the first one starts
    "api.mid-free",  # the other processes notice and end
    "tokenizer.after-reply",  # the blocks may be freed before the engine has attached them
    "nursery.starting",  # items wait for the next nursery
    "nursery.at work",  # the decoders die with the nursery
    "engine.consumed",  # the request's blocks are about to be freed
    "engine.parked",  # the media of a preempted answer are requested again
    "api.remade",  # the path file lists the media twice
)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("kill"), running_service, device) as rig:
        yield rig


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=pytest.mark.slow if str(point) in SLOW_SLICE else [])
        for point in POINTS
        if str(point) in (*SLICE, *SLOW_SLICE)
    ],
    ids=str,
)
def test_the_service_recovers_from_a_kill_at_each_point(rig: Rig, point: Point) -> None:
    found = run(rig, point)
    assert found.troubles == [], found
    if point.role in ("tokenizer", "nursery", "decoder"):
        assert found.outcomes == ["right"] * 3
    if point.name == "mid-decode":
        assert found.outcomes[1:] == ["right"] * 2, "they are answered whole: their clients had nothing yet"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_answer_that_is_not_streamed_is_repeated_unchanged(rig: Rig) -> None:
    """Although the engine is killed, the texts, log-probabilities and counts are those of an undisturbed request."""
    question = [{"role": "user", "content": "What is in the image?"}]
    drawn = {"temperature": 1.0, "seed": 7, "max_tokens": 120, "ignore_eos": True}
    chosen = {"n": 2, "logprobs": True, "top_logprobs": 2}
    mindies = {"do_sample": True, "seed": 7, "max_new_tokens": 120, "details": True}
    bodies = {
        "/v1/chat/completions": {"messages": question} | drawn | chosen,
        "/v1/completions": {"prompt": ["What?", "Where?"], "n": 2, "logprobs": 1, "echo": True} | drawn,
        "/infer": {"inputs": "What?", "parameters": mindies},
        "/generate": {"inputs": "What?", "parameters": mindies},
    }

    def ask(path: str) -> tuple[Any, list[float]]:
        """Return the answer without its floating-point numbers, and a list of these numbers."""
        numbers: list[float] = []
        answer = httpx2.post(f"{rig.service.url}{path}", json=bodies[path], timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        parsed = json.loads(answer.text, parse_float=lambda number: numbers.append(float(number)))
        for changing in ("id", "created"):
            parsed.pop(changing, None)
        parsed.get("usage", {}).pop("prompt_tokens_details", None)  # the next engine has a new cache
        return parsed, numbers

    rig.whole()
    undisturbed = {path: ask(path) for path in bodies}
    engine = rig.processes()["engine"]
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(ask, path) for path in bodies]
        wait_until(lambda: metric(rig.service, "num_requests_running") >= 6)
        rig.trigger(Point("engine", "mid-decode")).touch()
        for path, answer in zip(bodies, answers, strict=True):
            parsed, numbers = undisturbed[path]
            assert answer.result() == (parsed, pytest.approx(numbers, abs=1e-4))
    assert rig.whole()["engine"] != engine


def test_a_streamed_call_ends_with_an_error_if_the_engine_dies(rig: Rig) -> None:
    """Streams of tool calls and of a deprecated function call end with an error in the format that clients expect."""
    text = {"type": "object", "properties": {"text": {"type": "string", "minLength": 2000}}, "required": ["text"]}
    function = {"name": "write", "parameters": text}
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    called = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    older = {"functions": [function], "function_call": {"name": "write"}}
    engine = rig.whole()["engine"]
    with (
        httpx2.stream("POST", rig.service.url + CHAT, json=body | called, timeout=DEADLINE_S) as stream,
        openai.OpenAI(base_url=f"{rig.service.url}/v1", api_key="-", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        events = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        assert any('"arguments":"{' in event for event in events)
        chunks = client.chat.completions.create(**body | older)
        assert any(call.arguments for chunk in chunks if (call := chunk.choices[0].delta.function_call))
        rig.trigger(Point("engine", "mid-decode")).touch()
        *rest, failed, last = events
        with pytest.raises(openai.APIError, match="process") as caught:
            list(chunks)
    assert last == "[DONE]"
    error = json.loads(failed)["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert caught.value.body == error
    choices = [json.loads(event)["choices"][0] for event in rest]
    assert {choice["finish_reason"] for choice in choices} <= {None}, "a client would run the call that was cut"
    assert all(choice["delta"]["tool_calls"] for choice in choices)
    assert rig.whole()["engine"] != engine


def test_every_process_has_a_dozen_points() -> None:
    assert all(sum(point.role == role for point in POINTS) >= 12 for role in ("api", "tokenizer", "engine"))
    assert {str(point) for point in POINTS} >= {*SLICE, *SLOW_SLICE}
