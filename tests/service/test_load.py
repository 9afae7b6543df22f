"""Tests for the service under load: full queues, timeouts, and clients that disconnect or do not read."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import select
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import psutil
import pytest

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.settings.config import EngineConfig, MiB
from mindie_mm.worker.async_engine import AsyncEngine
from tests.warm import running_service
from tests.watching import metric, wait_until
from tools.serving import RunningService

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = 3
WAIT_S = 300.0
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
MORE_THAN_SOCKETS_HOLD: dict[str, Any] = {
    "prompt": [[5 + index % 50 for index in range(1000)]],
    "echo": True,
    "logprobs": 5,
    "n": 20,
    "max_tokens": 2,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
"""Request whose answer of about 13 MB exceeds all socket buffers. The choices share the prompt's KV cache."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Yield a service that accepts few requests at a time and does not disconnect clients that read slowly."""
    folder = tmp_path_factory.mktemp("loaded")
    settings = {
        "max_concurrent_requests": LIMIT,
        "send_timeout_s": 3600.0,
        "arena_bytes": 64 * MiB,
        "kv_cache_bytes": 64 * MiB,
        "num_threads": 1,
        "spool": folder / "spool",
    }
    with running_service(settings, folder / "log") as running:
        yield running
        if running.process.poll() is None:
            assert running.wait_until_free()["blocks"] == 0
            assert running.stop() == 0
    assert not list((folder / "spool").iterdir())


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Yield a service that ends requests after two seconds and disconnects clients that read nothing for one second."""
    folder = tmp_path_factory.mktemp("hasty")
    settings = {
        "request_timeout_s": 2.0,
        "allow_private_media": True,
        "send_timeout_s": 1.0,
        "arena_bytes": 64 * MiB,
        "kv_cache_bytes": 64 * MiB,
        "num_threads": 1,
        "spool": folder / "spool",
    }
    with running_service(settings, folder / "log") as running:
        yield running


def content(red_square: str) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": red_square}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is in the image?"}]}]


def post(service: RunningService, path: str, body: dict[str, Any], receive_bytes: int | None = None) -> socket.socket:
    """Send a request and return its connection, from which nothing has been read."""
    parts = urlsplit(service.url)
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(WAIT_S)
    connection.connect((parts.hostname, parts.port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def answer_of(connection: socket.socket) -> tuple[int, list[dict[str, Any]]]:
    """Read a stream to its end, which must be `[DONE]`, and return its status and events."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    lines = response.read().splitlines()
    assert lines[-2] == b"data: [DONE]"
    return response.status, [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def id_of(response: http.client.HTTPResponse) -> str:
    """Return the request id as it appears in the log."""
    request_id = response.headers["X-Request-Id"]
    assert request_id
    return request_id


def unfinished(service: RunningService) -> Counter[str]:
    """Return the number of choices that did not finish normally, by reason."""
    ends = ("refused", "error", "abort")
    return Counter({end: int(metric(service, "request_success_total", finished_reason=end)) for end in ends})


def connections(service: RunningService) -> int:
    """Return the number of open client connections of the service."""
    port = urlsplit(service.url).port
    of_service = psutil.Process(service.process.pid).net_connections("tcp")
    return sum(one.status != psutil.CONN_LISTEN and one.laddr.port == port for one in of_service)


def announcing(service: RunningService, num_bytes: int) -> int:
    """Announce a body of `num_bytes` without sending the body, and return the status of the response."""
    with socket.create_connection(urlsplit(service.url).netloc.rsplit(":", 1), WAIT_S) as uploading:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {num_bytes}\r\n\r\n"
        uploading.sendall(head.encode())
        response = http.client.HTTPResponse(uploading)
        response.begin()
        return response.status


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_refuses_requests_with_retry_after(loaded: RunningService, red_square: str, stream: bool) -> None:
    body = {"messages": content(red_square), **ENDLESS, "stream": stream}
    running = [post(loaded, CHAT, body) for _ in range(LIMIT)]
    wait_until(lambda: metric(loaded, "num_requests_running") == LIMIT)
    for path, further in ((CHAT, body), ("/infer", {"inputs": "x", "stream": stream}), ("/tokenize", {"prompt": "x"})):
        refused = httpx2.post(loaded.url + path, json=further, timeout=WAIT_S)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert f"the limit is {LIMIT}" in refused.json()["error"]["message"]
    assert announcing(loaded, 1_000_000) == 429, "before a body has come that is not wanted"
    assert announcing(loaded, 2**40) == 413, "which no later time would change"
    assert httpx2.get(f"{loaded.url}/health", timeout=WAIT_S).status_code == 200, "full is not ill"
    running.pop().close()
    short = {"messages": content(red_square), "max_tokens": 4}
    wait_until(lambda: httpx2.post(loaded.url + CHAT, json=short, timeout=WAIT_S).status_code == 200)
    assert metric(loaded, "num_requests_running") == LIMIT - 1, "those that were there first go on"
    for connection in running:
        connection.close()
    wait_until(lambda: metric(loaded, "num_requests_running") == 0)
    assert loaded.wait_until_free()["blocks"] == 0


def test_a_stream_ends_with_a_504_event_at_its_timeout(hasty: RunningService, red_square: str) -> None:
    body = {"messages": content(red_square), **ENDLESS, "n": 8, "stream": True}
    before = unfinished(hasty)
    with post(hasty, CHAT, body) as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        text = response.read().decode()
    assert response.status in (200, 504)  # 504 if a busy machine reaches the timeout before the first event
    assert '"code":504' in text
    assert "the limit of 2 s" in text
    if response.status == 200:
        assert text.endswith("data: [DONE]\n\n")
        why = "RequestTimeout: the request took longer than the limit of 2 s"
        warning = f"the response was aborted: {why} [{id_of(response)}]"
        wait_until(lambda: warning in hasty.log.read_text())
        line = re.compile(rf"POST {CHAT} 200 [\d.]+ s, aborted: RequestTimeout \[{id_of(response)}\]")
        wait_until(lambda: line.search(hasty.log.read_text()) is not None)  # logged after the end of the answer
    assert unfinished(hasty) == before + Counter(error=8), "its client did not leave"
    assert hasty.wait_until_free()["blocks"] == 0
    wait_until(lambda: metric(hasty, "num_requests_running") == 0)


def test_an_unstreamed_answer_is_504_at_its_timeout(hasty: RunningService, red_square: str) -> None:
    body = {"messages": content(red_square), **ENDLESS, "n": 8}
    before = unfinished(hasty)
    late = httpx2.post(hasty.url + CHAT, json=body, timeout=WAIT_S)
    assert late.status_code == 504
    assert unfinished(hasty) == before + Counter(error=8), "its client did not leave"
    assert late.json()["error"]["type"] == "TimeoutError"
    assert hasty.wait_until_free()["blocks"] == 0
    wait_until(lambda: metric(hasty, "num_requests_running") == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_requests_that_end_while_fetching_media_are_counted(hasty: RunningService, stream: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.png"
        body = {"messages": content(url), "n": 2, "stream": stream}
        before = unfinished(hasty)
        assert httpx2.post(hasty.url + CHAT, json=body, timeout=WAIT_S).status_code == 504
        assert unfinished(hasty) == before + Counter(error=2)
        silent.accept()[0].close()
        with post(hasty, CHAT, body):
            fetching, _ = silent.accept()
        with fetching:
            wait_until(lambda: unfinished(hasty) != before + Counter(error=2))
        assert unfinished(hasty) == before + Counter(error=2, abort=2)


def test_a_client_that_reads_nothing_is_disconnected(hasty: RunningService) -> None:
    before = connections(hasty)
    with post(hasty, COMPLETIONS, MORE_THAN_SOCKETS_HOLD, receive_bytes=2048):
        wait_until(lambda: metric(hasty, "http_requests_total", handler=COMPLETIONS) == 1)
        wait_until(lambda: connections(hasty) <= before)
        wait_until(lambda: metric(hasty, "num_requests_running") == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_byte_by_byte_is_disconnected_at_the_timeout(hasty: RunningService, stream: bool) -> None:
    answered = metric(hasty, "http_requests_total", handler=COMPLETIONS)
    with post(hasty, COMPLETIONS, MORE_THAN_SOCKETS_HOLD | {"stream": stream}, receive_bytes=2048) as trickle:
        read = 0

        def ended() -> bool:
            nonlocal read
            read += len(trickle.recv(1))
            return metric(hasty, "http_requests_total", handler=COMPLETIONS) > answered

        wait_until(ended)
        assert read > 0
        wait_until(lambda: metric(hasty, "num_requests_running") == 0)


def test_slow_readers_delay_no_other_request(loaded: RunningService, red_square: str) -> None:
    """The engine finishes the answers, and another request is answered, before the slow clients have read a byte."""
    request = {**MORE_THAN_SOCKETS_HOLD, "stream_options": {"include_usage": True}}
    before = metric(loaded, "request_success_total", finished_reason="length")
    slow = [post(loaded, COMPLETIONS, request, receive_bytes=2048) for _ in range(LIMIT - 1)]
    done = before + len(slow) * request["n"]
    wait_until(lambda: metric(loaded, "request_success_total", finished_reason="length") == done)
    assert metric(loaded, "num_requests_running") == 0
    answered = httpx2.post(loaded.url + CHAT, json={"messages": content(red_square), "temperature": 0}, timeout=WAIT_S)
    assert answered.status_code == 200
    assert "red square" in answered.text
    wait_until(lambda: loaded.shm()["blocks"] == 0)
    for connection in slow:
        with connection:
            status, events = answer_of(connection)
        assert status == 200
        assert events[-1]["usage"]["completion_tokens"] == request["n"] * request["max_tokens"]
        ends = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert ends.count("length") == request["n"]


def test_an_unread_answer_counts_as_a_concurrent_request(loaded: RunningService) -> None:
    """An answer that the engine has finished counts until the client has read all of it or has disconnected."""
    before = metric(loaded, "request_success_total", finished_reason="length")
    whole = MORE_THAN_SOCKETS_HOLD | {"stream": False}
    slow = [post(loaded, COMPLETIONS, whole, receive_bytes=2048) for _ in range(LIMIT)]
    wait_until(lambda: metric(loaded, "request_success_total", finished_reason="length") == before + LIMIT * whole["n"])

    def status_of_another() -> int:
        return httpx2.post(f"{loaded.url}/tokenize", json={"prompt": "x"}, timeout=WAIT_S).status_code

    assert status_of_another() == 429
    with slow.pop() as reading:
        response = http.client.HTTPResponse(reading)
        response.begin()
        assert status_of_another() == 429, "the client has its beginning alone"
        assert len(json.loads(response.read())["choices"]) == whole["n"]
    wait_until(lambda: status_of_another() == 200)
    for connection in slow:
        connection.close()
    wait_until(lambda: f"POST {COMPLETIONS} 200" in loaded.log.read_text())

    def all_places_are_free() -> bool:
        try:
            fill_up(loaded, LIMIT)
        except httpx2.HTTPStatusError:
            return False
        return True

    wait_until(all_places_are_free)


def test_the_media_of_a_slow_reader_are_freed_while_it_reads(loaded: RunningService, red_square: str) -> None:
    pictured = f'<img src="{red_square.replace("image/png", "image/jpeg")}">'
    changes = {"prompt": f"{pictured} " + "red square " * 400, "stop": None}
    before = metric(loaded, "request_success_total", finished_reason="length")
    with post(loaded, COMPLETIONS, MORE_THAN_SOCKETS_HOLD | changes, receive_bytes=2048) as slow:
        wait_until(lambda: metric(loaded, "request_success_total", finished_reason="length") == before + 20)
        wait_until(lambda: loaded.shm()["blocks"] == 0)
        with pytest.raises(httpx2.HTTPStatusError):  # the slow answer still counts as one request
            fill_up(loaded, LIMIT)
        assert answer_of(slow)[0] == 200


def fill_up(service: RunningService, count: int) -> None:
    """Send `count` concurrent requests. Raise HTTPStatusError if the last of them is refused."""
    held = [post(service, CHAT, {"messages": [{"role": "user", "content": "x"}], **ENDLESS}) for _ in range(count - 1)]
    try:
        wait_until(lambda: metric(service, "num_requests_running") == count - 1)
        httpx2.post(service.url + CHAT, json={"messages": [{"role": "user", "content": "x"}]}).raise_for_status()
    finally:
        for connection in held:
            connection.close()
        wait_until(lambda: metric(service, "num_requests_running") == 0)


def test_a_client_that_reads_nothing_does_not_delay_the_stop(loaded: RunningService) -> None:
    """This test stops the service, so it must be the last test that uses `loaded`."""
    before = metric(loaded, "request_success_total", finished_reason="length")
    with post(loaded, COMPLETIONS, MORE_THAN_SOCKETS_HOLD, receive_bytes=2048):
        wait_until(lambda: metric(loaded, "request_success_total", finished_reason="length") == before + 20)
        assert loaded.stop() == 0


@pytest.mark.usefixtures("copied_workers")
async def test_an_abort_stops_the_engine_within_one_step() -> None:
    """After a client has left, the engine finishes at most the current step with the client's request."""
    engine = await AsyncEngine.start(None, EngineConfig(device="cpu", kv_cache_bytes=16 * MiB, num_threads=1))
    try:
        params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        leaving, staying = (
            engine.generate(name, np.array([5, 6, index], np.int64), params) for index, name in enumerate("ab")
        )
        running: list[int] = []

        async def read() -> None:
            async for _ in staying:
                running.append(engine.stats.num_running)  # noqa: PERF401 - read while the loop runs

        reading = asyncio.create_task(read())
        await anext(leaving)
        await until(lambda: 2 in running)
        os.kill(engine.pid, signal.SIGSTOP)
        await wait_until_stopped_and_read(engine)
        before = len(running)
        await leaving.aclose()
        os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: len(running) >= before + 3)
        assert running[before - 1] == 2
        assert set(running[before + 1 :]) == {1}, "one step may have been in work"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await staying.aclose()
        await until(lambda: engine.stats.num_running == 0)
        assert engine.stats.kv_cache_usage == 0
    finally:
        await engine.close()


async def wait_until_stopped_and_read(engine: AsyncEngine) -> None:
    """Wait until the engine is stopped, and everything that it has sent has been read."""
    process = psutil.Process(engine.pid)
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    channel = engine.child.channel._writer.get_extra_info("socket")
    await until(lambda: not select.select([channel.fileno()], [], [], 0)[0])
    for _ in range(3):  # messages pass from the stream to the queue, and from the queue to the reader
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the condition depends on another process
            await asyncio.sleep(0)
