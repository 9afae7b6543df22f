"""Tests that kill processes with SIGKILL at selected points. `make faults` kills them at all points."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from mindie_mm.shm import survey
from tests.audio_samples import encode_audio, tone
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
    "engine.mid-decode",  # answers that have begun continue
    "api.everything",  # only the next service can free the memory
)
SLOW_SLICE = (
    "fork_server.starting",  # a copy takes over, whose own copy dies
    "fork_server.at rest",  # the other processes continue
    "replica.attached",  # the other engine answers a request without output
    "replica.mid-decode",  # answers that have begun continue in the other engine
    "replica.starting",  # the other engine answers while the first one starts
    "api.mid-free",  # the other processes notice and end
    "tokenizer.after-reply",  # the blocks may be freed before the engine has attached them
    "nursery.starting",  # items wait for the next nursery
    "nursery.at work",  # the decoders die with the nursery
    "engine.consumed",  # the request's blocks are about to be freed
    "engine.media-lost",  # a preempted answer needs media that were freed
    "engine.restored",  # the engine has just taken over an answer that has begun
    "api.remade",  # the path file lists the media twice
    "api.added-again",  # the engine continues an answer when the service dies
    "api.uploading",  # a file has been received, but not stored
    "api.batch-begun",  # no request of a batch has been answered
    "api.batch-answered",  # a line has been written and counted, but the count has not been stored
    "api.batch-finalizing",  # all lines have been written
    "api.batch-described",  # the output has a description, but no content
    "api.batch-ended",  # the batch has ended, but its folder has not been cleaned
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
    if point.role != "api":
        assert {*found.outcomes} == {"right"}, "also streams"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_engines", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one engine", "two engines"])
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
def test_answers_continue_unchanged(rig: Rig, stream: bool, num_engines: int) -> None:
    """Although the engine is killed, the texts, log-probabilities and counts are those of an undisturbed request."""
    question = [{"role": "user", "content": "What is in the image?"}]
    drawn = {"temperature": 1.0, "seed": 7, "max_tokens": 120, "ignore_eos": True, "stream": stream}
    if stream:
        drawn["stream_options"] = {"include_usage": True}
    chosen = {"n": 2, "logprobs": True, "top_logprobs": 2}
    mindies = {"do_sample": True, "seed": 7, "max_new_tokens": 120, "details": True}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": question} | drawn | chosen,
        "/v1/completions": {"prompt": ["What?", "Where?"], "n": 2, "logprobs": 1, "echo": True} | drawn,
        "/infer": {"inputs": "What?", "stream": stream, "parameters": mindies},
        "/generate_stream" if stream else "/generate": {"inputs": "What?", "parameters": mindies},
    }

    def ask(path: str) -> tuple[Any, list[float]]:
        """Return the answer without its floating-point numbers, and a list of these numbers."""
        numbers: list[float] = []
        answer = httpx2.post(f"{rig.service.url}{path}", json=bodies[path], timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        if stream:
            return joined(answer.text), numbers
        parsed = json.loads(answer.text, parse_float=lambda number: numbers.append(float(number)))
        for changing in ("id", "created"):
            parsed.pop(changing, None)
        parsed.get("usage", {}).pop("prompt_tokens_details", None)  # the next engine has a new cache
        return parsed, numbers

    rig.require(num_engines)
    rig.whole()
    undisturbed = {path: ask(path) for path in bodies}
    role = "engine" if num_engines == 1 else "replica"
    engines = rig.processes()[role]
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(ask, path) for path in bodies]
        wait_until(lambda: metric(rig.service, "num_requests_running") >= 6)
        rig.trigger(Point(role, "mid-decode")).touch()
        for path, answer in zip(bodies, answers, strict=True):
            parsed, numbers = undisturbed[path]
            assert answer.result() == (parsed, pytest.approx(numbers, abs=1e-4))
    assert rig.whole()[role] != engines


def joined(body: str) -> dict[str, Any]:
    """Return what a client collects from a stream: the texts of its choices, their ends and their usage."""
    found: dict[str, Any] = {}
    for line in body.splitlines():
        data = line.removeprefix("data:").strip()
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        assert "error" not in event, event
        for part in event.get("choices", ()):
            text = part["text"] if "text" in part else part["delta"].get("content", "")
            found[f"text {part['index']}"] = found.get(f"text {part['index']}", "") + text
            found[f"end {part['index']}"] = part["finish_reason"]
        if whole := event.get("generated_text"):  # the last event of MindIE's streams
            found["whole"], found["details"] = whole, event["details"]
        if usage := event.get("usage"):
            found["tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
    assert found
    return found


@pytest.mark.slow  # the shorter suite continues streams of texts
def test_streamed_calls_continue_if_the_engine_dies(rig: Rig) -> None:
    """Streams of tool calls and of a deprecated function call have the arguments of undisturbed streams."""
    text = {"type": "object", "properties": {"text": {"type": "string", "minLength": 400}}, "required": ["text"]}
    function = {"name": "write", "parameters": text}
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    body |= {"temperature": 0}
    called = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    older = {"functions": [function], "function_call": {"name": "write"}}
    rig.require(1)
    engine = rig.whole()["engine"]
    with openai.OpenAI(base_url=f"{rig.service.url}/v1", api_key="-", max_retries=0, timeout=DEADLINE_S) as client:

        def arguments(form: dict[str, Any], begun: threading.Event | None = None) -> str:
            found = ""
            for chunk in client.chat.completions.create(**body | form):
                delta = chunk.choices[0].delta
                call = delta.tool_calls[0].function if delta.tool_calls else delta.function_call
                found += (call and call.arguments) or ""
                if found and begun is not None:
                    begun.set()
            return found

        undisturbed = [arguments(form) for form in (called, older)]
        begun = [threading.Event(), threading.Event()]
        with ThreadPoolExecutor() as threads:
            answers = [threads.submit(arguments, *one) for one in zip((called, older), begun, strict=True)]
            for one in begun:
                one.wait(DEADLINE_S)
            rig.trigger(Point("engine", "mid-decode")).touch()
            assert [answer.result() for answer in answers] == undisturbed
    assert all(one.startswith('{"text": "') and len(one) > 400 for one in undisturbed)
    assert rig.whole()["engine"] != engine


MIDDLE = Point("api", "sent")
"""The engine has a request whose media are in the spool and in shared memory."""


def image(rig: Rig) -> dict[str, Any]:
    return rig.image("red", (220, 40, 40), "square")


def asked(rig: Rig, path: str) -> Any:
    """Send a request with a new image, or with audio, and return what its answer says."""
    part = image(rig)
    url = part["image_url"]["url"]
    chat = {"messages": [{"role": "user", "content": [part]}]}
    document = {"content": [part]}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        "/v1/messages": {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
        },
        "/v1/embeddings": chat,
        "/v1/rerank": {"query": "What is red?", "documents": [document, "a blue circle"]},
        "/v1/score": {"text_1": "What is red?", "text_2": [document, "a blue circle"]},
    }
    form: dict[str, Any] = {"json": bodies.get(path)}
    if path not in bodies:
        form = {"files": {"file": encode_audio(tone(2), 16_000)}, "data": {"model": "tiny"}}
    answer = httpx2.post(f"{rig.service.url}{path}", timeout=DEADLINE_S, **form)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if path == "/v1/embeddings":
        return said["data"][0]["embedding"]
    if path in ("/v1/rerank", "/v1/score"):
        return [one.get("relevance_score", one.get("score")) for one in said.get("results", said.get("data"))]
    if path.startswith("/v1/audio"):
        return said["text"]
    return (said["content"] if path == "/v1/messages" else said["output"][0]["content"])[0]["text"]


@pytest.mark.slow  # the shorter suite kills the service in the middle of chats
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    ],
)
def test_a_service_killed_in_the_middle_of_a_request_leaves_what_the_next_start_removes(rig: Rig, path: str) -> None:
    rig.require(1)
    rig.whole()
    undisturbed = asked(rig, path)
    assert rig.service.wait_until_free()["blocks"] == 0
    rig.trigger(MIDDLE).touch()
    with pytest.raises(httpx2.HTTPError):
        asked(rig, path)
    rig.service.process.wait(DEADLINE_S)
    assert rig.left_in_spool()
    rig.close()
    rig.whole()
    assert rig.left_in_spool() == []
    assert all(arena.alive for arena in survey())
    found = asked(rig, path)
    assert found == (undisturbed if isinstance(found, str) else pytest.approx(undisturbed, abs=1e-4))
    assert rig.service.wait_until_free()["blocks"] == 0


def test_every_process_has_a_dozen_points() -> None:
    assert all(sum(point.role == role for point in POINTS) >= 12 for role in ("api", "tokenizer", "engine"))
    assert {str(point) for point in POINTS} >= {*SLICE, *SLOW_SLICE}
