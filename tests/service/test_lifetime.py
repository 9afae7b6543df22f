"""Tests that a request frees its memory when its client leaves, its timeout passes or the request is aborted."""

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from mindie_mm.errors import QueueFull, RequestAborted, RequestTimeout, ServiceStopping
from service.request.admission import Admission
from tests.watching import metric, wait_until
from tools.serving import RunningService

ENDLESS: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def endless_chat(service: RunningService, red_square: str, **changes: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": red_square}}, {"type": "text", "text": "What?"}]
    limit = service.get("/v1/models")["data"][0]["max_model_len"]
    body = {"messages": [{"role": "user", "content": content}], **ENDLESS, **changes}
    return body | {"max_tokens": min(2000, limit // 2)}


def post(service: RunningService, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and return its connection, from which nothing has been read."""
    host = urlsplit(service.url)
    assert host.hostname is not None
    connection = socket.create_connection((host.hostname, host.port or 80), timeout=300)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/infer"])
def test_a_client_that_leaves_frees_everything(
    service: RunningService, red_square: str, path: str, stream: bool
) -> None:
    aborted = metric(service, "request_success_total", finished_reason="abort")
    started_before = metric(service, "time_to_first_token_seconds_count")
    body = endless_chat(service, red_square, stream=stream)
    if path == "/infer":
        parameters = {"max_new_tokens": body["max_tokens"], "temperature": 50.0, "seed": 0}
        body = {"inputs": [{"image": red_square}, {"text": "What?"}], "stream": stream, "parameters": parameters}
    with post(service, path, body) as connection:
        wait_until(lambda: metric(service, "time_to_first_token_seconds_count") > started_before)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert service.wait_until_free()["blocks"] == 0
    assert metric(service, "request_success_total", finished_reason="abort") == aborted + 1


def test_a_client_that_leaves_stops_the_engine(service: RunningService, red_square: str) -> None:
    aborted = metric(service, "request_success_total", finished_reason="abort")
    with post(service, "/v1/chat/completions", endless_chat(service, red_square, n=2)):
        wait_until(lambda: metric(service, "num_requests_running") == 2)
    wait_until(lambda: metric(service, "num_requests_running") == 0)
    assert metric(service, "request_success_total", finished_reason="abort") == aborted + 2
    assert service.wait_until_free()["blocks"] == 0


def test_each_token_is_counted_once_as_it_is_generated(service: RunningService, red_square: str) -> None:
    wait_until(lambda: metric(service, "num_requests_running") == 0)
    names = ("generation_tokens_total", "request_generation_tokens_sum", "request_success_total")
    before = {name: metric(service, name) for name in names}
    with post(service, "/v1/chat/completions", endless_chat(service, red_square, n=2)):
        wait_until(lambda: metric(service, "generation_tokens_total") > before["generation_tokens_total"] + 2)
        assert metric(service, "request_success_total") == before["request_success_total"], "none has ended"
    wait_until(lambda: metric(service, "request_success_total") == before["request_success_total"] + 2)
    counted, of_choices = (metric(service, name) - before[name] for name in names[:2])
    assert counted == of_choices > 2


def test_a_prompt_that_is_too_long_and_its_neighbor_count_as_refused(service: RunningService, http: Any) -> None:
    wait_until(lambda: metric(service, "num_requests_running") == 0)
    limit = service.get("/v1/models")["data"][0]["max_model_len"]
    ends = ("refused", "error", "abort")
    before = {end: metric(service, "request_success_total", finished_reason=end) for end in ends}
    body = {"prompt": [[5, 6], [5] * (limit + 1)], "max_tokens": limit // 2, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 400
    grown = {end: metric(service, "request_success_total", finished_reason=end) - before[end] for end in ends}
    assert grown == {"refused": 2, "error": 0, "abort": 0}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "number"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"image": "AAAA"}]}], "n": 3}, 3),
        ("/v1/completions", {"prompt": ["x", "y" * 10**6], "n": 2}, 4),
        ("/v1/completions", {"prompt": [[5], [10**8]]}, 2),
        ("/infer", {"inputs": [{"image": "/etc/passwd"}]}, 1),
    ],
)
def test_requests_refused_before_the_engine_are_counted(
    service: RunningService, http: Any, path: str, body: dict[str, Any], number: int, stream: bool
) -> None:
    ends = ("refused", "error", "abort")
    before = {end: metric(service, "request_success_total", finished_reason=end) for end in ends}
    timed = metric(service, "e2e_request_latency_seconds_count")
    assert http.post(path, json=body | {"stream": stream}).status_code == 400
    grown = {end: metric(service, "request_success_total", finished_reason=end) - before[end] for end in ends}
    assert grown == {"refused": number, "error": 0, "abort": 0}
    assert metric(service, "e2e_request_latency_seconds_count") == timed + number


def test_clients_that_leave_at_once_free_everything(service: RunningService, red_square: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize") * 10:
        post(service, path, endless_chat(service, red_square)).close()
    assert service.wait_until_free()["blocks"] == 0


def test_a_stream_closed_by_the_openai_client_frees_everything(
    service: RunningService, client: openai.OpenAI, red_square: str
) -> None:
    body = endless_chat(service, red_square)
    messages = body.pop("messages")
    ignore_eos = {"ignore_eos": body.pop("ignore_eos")}
    with client.chat.completions.create(
        model="tiny", messages=messages, stream=True, extra_body=ignore_eos, **body
    ) as stream:
        next(iter(stream))
        assert metric(service, "num_requests_running") == 1
    assert service.wait_until_free()["blocks"] == 0


def test_a_timeout_frees_everything(service: RunningService, http: Any, red_square: str) -> None:
    body = {"inputs": [{"image": red_square}, {"text": "What?"}]}
    limit = service.get("/v1/models")["data"][0]["max_model_len"]
    parameters = {"max_new_tokens": limit - 300, "timeout": 1, "temperature": 50.0}
    answer = http.post("/infer", json=body | {"parameters": parameters})
    # A fast machine may finish before the timeout. In either case, no block may be left.
    assert answer.status_code in (200, 504), answer.text
    if answer.status_code == 504:
        assert answer.json()["error"]["type"] == "TimeoutError"
    assert service.wait_until_free()["blocks"] == 0


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_admission_refuses_requests_above_its_limit() -> None:
    admission = Admission(1, 10)
    async with admission.admit(never):
        with pytest.raises(QueueFull, match="the limit is 1"):
            async with admission.admit(never):
                pytest.fail("admitted")
    async with admission.admit(never):
        assert len(admission) == 1
    assert len(admission) == 0


async def test_admission_ends_a_request_at_its_timeout() -> None:
    with pytest.raises(RequestTimeout, match=r"limit of 0\.05 s"):
        async with Admission(1, 10).admit(never, timeout_s=0.05):
            await asyncio.Event().wait()


async def test_admission_ends_a_request_whose_client_left() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(RequestAborted):
        async with Admission(1, 10).admit(gone):
            await asyncio.Event().wait()


async def test_a_stopping_admission_ends_and_refuses_requests() -> None:
    admission = Admission(2, 10)
    started = asyncio.Event()

    async def request() -> None:
        async with admission.admit(never):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await started.wait()
    await admission.stop(grace_s=0)
    with pytest.raises(ServiceStopping):
        await task
    with pytest.raises(ServiceStopping):
        async with admission.admit(never):
            pytest.fail("admitted")


async def test_admission_lets_an_error_through() -> None:
    with pytest.raises(KeyError):
        async with Admission(1, 10).admit(never):
            raise KeyError


async def test_admission_lets_a_foreign_cancellation_through() -> None:
    admission = Admission(1, 10)
    started = asyncio.Event()

    async def request() -> None:
        async with admission.admit(never):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(admission) == 0
