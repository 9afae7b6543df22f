"""Tests that the log has the expected records and contains no media, prompts or keys."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.warm import running_service
from tests.watching import metric, wait_until
from tools.serving import RunningService

KEY, WRONG_KEY = "the-right-api-key", "a-wrong-api-key"
PROMPT = "Whisper about Ozymandias"
SYSTEM = "You never mention Xanadu"
SCHEMA_NAME = "Kubla"
UNKNOWN_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("/infer", "x_infer", {"inputs": PROMPT, "x_infer": 1}),
    ("/infer", "parameters.max_new_token", {"inputs": PROMPT, "parameters": {"max_new_token": 1, "typical_p": 0.5}}),
    ("/generate", "parameters.x_generate", {"inputs": PROMPT, "parameters": {"x_generate": 1}}),
    ("/generate_stream", "x_stream", {"inputs": PROMPT, "x_stream": 1}),
    ("/tokenize", "x_tokenize", {"prompt": PROMPT, "x_tokenize": 1}),
    ("/detokenize", "x_detokenize", {"tokens": [5], "x_detokenize": 1}),
    (
        "/v1/completions",
        "stream_options.x_option",
        {
            "prompt": PROMPT,
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"x_option": 1, "include_obfuscation": True},
        },
    ),
]
"""Paths, unknown fields and bodies of requests with these fields."""
OF_A_LIBRARY = re.compile(r"\[W\d{4} \d\d:\d\d:\d\d.\d+ \w+\.cpp:\d+\] ")
"""Lines that the C++ code of torch or torch_npu writes to standard error."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module", params=[False, True], ids=["quiet", "prompts"])
def talk(
    request: pytest.FixtureRequest, settings: dict[str, object], folder: Path, red_square: str
) -> tuple[bool, str, str, RunningService]:
    """Return whether prompts are logged, the text of the log, the image that was sent, and the stopped service.

    The service that logs prompts also has the setting `strict`.
    """
    log = folder / f"log-{request.param}"
    given = settings | {"log_format": "json", "log_level": "debug", "spool": folder / "spool", "api_key": KEY}
    with running_service(given | {"log_prompts": request.param, "strict": request.param}, log) as service:
        with httpx2.Client(base_url=service.url, timeout=300, headers={"Authorization": f"Bearer {KEY}"}) as http:
            converse(http, red_square, strict=request.param)
        assert service.stop() == 0
    return request.param, log.read_text(), red_square, service


def converse(http: Any, image: str, *, strict: bool) -> None:
    """Send requests that succeed, and requests that fail at each stage of processing."""
    chat = "/v1/chat/completions"
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": PROMPT}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    good = {"messages": messages, "max_tokens": 2}
    assert http.post(chat, json=good, headers={"X-Request-Id": "mine-1"}).status_code == 200
    assert http.post(chat, json=good | {"stream": True}).status_code == 200
    assert http.post("/infer", json={"inputs": f"<img src='{image}'>{PROMPT}"}).status_code == 200
    inline = {"prompt": f"{PROMPT}: {image}", "max_tokens": 1}
    assert http.post("/v1/completions", json=inline).status_code == 200
    assert http.post(chat, json=good, headers={"Authorization": f"Bearer {WRONG_KEY}"}).status_code == 401
    assert http.post(f"{chat}?api_key={KEY}&q={PROMPT}", json=good).status_code == 200
    for wrong in (
        {"max_tokens": PROMPT},
        {"messages": [{"role": PROMPT, "content": PROMPT}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image[:-40]}}]}]},
        {"messages": [{"role": "user", "content": f"{PROMPT}\ud800"}]},
        {"max_tokens": 10**6},
        {"response_format": {"type": "json_schema", "json_schema": {"name": SCHEMA_NAME, "schema": {"type": PROMPT}}}},
        {"chat_template_kwargs": {PROMPT: [PROMPT]}, "add_generation_prompt": PROMPT},
    ):
        body = json.dumps(good | wrong).encode()
        assert http.post(chat, content=body, headers={"Content-Type": "application/json"}).status_code == 400, wrong
    send_unknown_keys(http, strict=strict)
    assert http.post(chat, content=f'{{"{PROMPT}'.encode()).status_code == 400
    assert http.get(f"/{KEY}/{PROMPT}").status_code == 404
    assert http.get(f"/v1/{KEY}").status_code == 404


def send_unknown_keys(http: Any, *, strict: bool) -> None:
    """Send chats with unknown keys in content parts, messages and the body. Repeat some of them."""
    part = {"type": "text", "text": PROMPT, "annotations": [], "id": "msg_1"}
    for _ in range(2):
        chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        for path, body in (("/v1/chat/completions", chat), ("/tokenize", chat)):
            answer = http.post(path, json=body)
            assert answer.status_code == (400 if strict else 200), answer.text
            assert not strict or "has the unknown key 'annotations'" in answer.json()["error"]["message"]
    for path, field, body in UNKNOWN_FIELDS:
        answer = http.post(path, json=body)
        assert answer.status_code == (400 if strict else 200), (path, answer.text)
        assert not strict or f"the unknown field '{field}'" in answer.json()["error"]["message"]
    good = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "store": True}
    for change in (
        {},
        {"x_field": 1},
        {"reasoning_effort": "x_high"},
        {"messages": [{"role": "user", "content": PROMPT, "x_key": 1}]},
    ):
        answer = http.post("/v1/chat/completions", json=good | change)
        assert answer.status_code == (400 if strict and change else 200), answer.text
        assert not strict or not change or "'x_" in answer.json()["error"]["message"]


def records(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if not OF_A_LIBRARY.match(line)]


Talk = tuple[bool, str, str, RunningService]


def test_every_log_line_is_a_json_object(talk: Talk) -> None:
    found = records(talk[1])
    assert {record["process"] for record in found} >= {"api", "engine"}
    assert {record["process"] for record in found} <= {"api", "engine", "tokenizer", "nursery"}
    assert all(record.keys() >= {"time", "level", "logger", "message", "pid"} for record in found)
    assert not [record for record in found if record["level"] in ("error", "critical")]


def test_an_ignored_key_is_logged_once(talk: Talk) -> None:
    strict, log, _, _ = talk
    warnings = [record["message"] for record in records(log) if record["level"] == "warning"]
    assert [message for message in warnings if "annotations" in message or "'id'" in message] == [
        f"ignoring the unknown key {key!r} of an item; this warning is not repeated"
        for key in ([] if strict else ["annotations", "id"])
    ]


def test_an_ignored_reasoning_effort_is_logged_once(talk: Talk) -> None:
    strict, log, _, _ = talk
    warnings = [record["message"] for record in records(log) if record["level"] == "warning"]
    assert [message for message in warnings if "effort" in message] == [
        "ignoring reasoning_effort, which the model's chat template does not use; this warning is not repeated"
    ] * (not strict)


def test_an_ignored_field_of_each_route_is_logged_once(talk: Talk) -> None:
    strict, log, _, _ = talk
    warnings = [record["message"] for record in records(log) if record["level"] == "warning"]
    for _, field, _ in UNKNOWN_FIELDS:
        text = f"ignoring the unknown key {field!r} of a request; this warning is not repeated"
        assert warnings.count(text) == (not strict), field


def test_keys_and_media_are_never_logged(talk: Talk) -> None:
    _, log, image, _ = talk
    assert KEY not in log
    assert WRONG_KEY not in log
    data = image.partition(",")[2]
    assert len(data) > 200
    for start in range(0, len(data) - 24, 8):
        assert data[start : start + 24] not in log


def test_prompts_are_logged_only_with_log_prompts(talk: Talk) -> None:
    log_prompts, log, _, _ = talk
    logged = [record for record in records(log) if record["logger"] == "service.request.call"]
    if not log_prompts:
        assert logged == []
        for word in ("Ozymandias", "Xanadu", SCHEMA_NAME, "Whisper"):
            assert word not in log
        return
    assert len(logged) == 6
    for record in logged:
        assert PROMPT in record["message"]
        assert record["request_id"]
    assert SYSTEM in logged[0]["message"]
    assert "<image of " in logged[0]["message"]
    assert "data:image/png;base64,..." in logged[3]["message"] or "data:image/jpeg;base64,..." in logged[3]["message"]


def test_each_request_has_its_access_line(talk: Talk) -> None:
    lines = [record for record in records(talk[1]) if record["logger"] == "service.access"]
    assert [(line["status"], line["route"]) for line in lines[:6]] == [
        (200, "/v1/chat/completions"),
        (200, "/v1/chat/completions"),
        (200, "/infer"),
        (200, "/v1/completions"),
        (401, "none"),
        (200, "/v1/chat/completions"),
    ]
    assert [(line["status"], line["route"], line.get("path")) for line in lines[-2:]] == [
        (404, "none", None),
        (404, "none", "/v1/***"),
    ]
    assert all(("reason" in line) == (line["status"] >= 400) for line in lines)
    assert lines[4]["reason"] == "the request has no valid API key; send the header Authorization: Bearer KEY"
    assert lines[0]["client_request_id"] == "mine-1"
    assert len({line["request_id"] for line in lines}) == len(lines) == 24 + len(UNKNOWN_FIELDS)
    assert all(line["duration_s"] > 0 and line["method"] in ("POST", "GET") for line in lines)


@contextmanager
def streaming(service: RunningService, n: int) -> Iterator[Any]:
    """Yield the response of a started stream of `n` choices."""
    limit = service.get("/v1/models")["data"][0]["max_model_len"]
    body = {"prompt": PROMPT, "n": n, "max_tokens": limit // 2, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{service.url}/v1/completions", json=body, timeout=300) as response:
        assert response.status_code == 200
        yield response


def test_interrupted_streams_are_logged_and_counted(settings: dict[str, object], tmp_path: Path) -> None:
    """Three streams fail after they were answered with status 200.

    The client of the first stream disconnects, the engine dies twice during the second, which survives only one death,
    and the service stops during the third.
    """
    log = tmp_path / "log"
    with running_service(settings | {"log_format": "json", "spool": tmp_path / "spool"}, log) as service:
        with streaming(service, 2) as left:
            next(left.iter_raw())
        wait_until(lambda: metric(service, "request_success_total", finished_reason="abort") == 2)
        with streaming(service, 3) as died:
            events = died.iter_lines()
            for restarts in range(2):
                wait_until(lambda n=restarts: metric(service, "process_restarts_total", process="engine") == n)
                wait_until(lambda: metric(service, "num_requests_running") == 3)
                next(events)
                (engine,) = (
                    child
                    for child in psutil.Process(service.process.pid).children()
                    if "mindie_mm.engine.process.engine_process" in child.cmdline()
                )
                engine.kill()
            assert '"code":503' in [line for line in events if line][-2]
        assert metric(service, "request_success_total", finished_reason="error") == 3
        assert metric(service, "request_success_total") == 5
        assert metric(service, "generation_tokens_total") == metric(service, "request_generation_tokens_sum") > 0
        with streaming(service, 1) as stopped:
            events = stopped.iter_lines()
            next(events)
            service.process.send_signal(signal.SIGTERM)
            assert '"code":503' in [line for line in events if line][-2]
        assert service.process.wait(120) == 0
    logged = records(log.read_text())
    ids = [response.headers["x-request-id"] for response in (left, died, stopped)]
    names = ["RequestAborted", "ProcessDied", "ServiceStopping"]
    lines = [line for line in logged if line["logger"] == "service.access" and line["level"] == "info"]
    assert [(line["request_id"], line["status"], line["error"]) for line in lines] == [
        (one, 200, name) for one, name in zip(ids, names, strict=True)
    ]
    assert [line["message"].rpartition(", ")[2] for line in lines] == [f"aborted: {name}" for name in names]
    breaks = [
        (line["level"], line["request_id"], line["message"])
        for line in logged
        if line["logger"] == "service.request.admitted"
    ]
    assert [one[:2] for one in breaks] == [("warning", ids[1]), ("warning", ids[2])], "one line each; clients may leave"
    assert re.search(r"was aborted: ProcessDied: the engine process \d+ died", breaks[0][2])
    assert "was aborted: ServiceStopping: the service stopped before the request was finished" in breaks[1][2]
