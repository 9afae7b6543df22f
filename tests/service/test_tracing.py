"""Tests for the OpenTelemetry spans that the service sends to a collector."""

from __future__ import annotations

import gzip
import itertools
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from service.telemetry.tracing import OncePerMinute
from tests.warm import running_service
from tools.serving import RunningService

PROMPT = "Whisper about Ozymandias"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Collector:
    """A collector that receives spans as OTLP over HTTP at a loopback address."""

    def __init__(self) -> None:
        self.bodies: queue.Queue[bytes] = queue.Queue()
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}
        self.url = ""

    def wait_for(self, number: int) -> list[Any]:
        """Wait until at least `number` spans have arrived, and return all spans."""
        deadline = time.monotonic() + 30
        while len(self.spans) < number:
            body = self.bodies.get(timeout=max(0.01, deadline - time.monotonic()))
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resource = attributes(of_resource.resource)
                for scope in of_resource.scope_spans:
                    self.spans += scope.spans
        return self.spans


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.bodies.put(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def attributes(message: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in message.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def traced(
    settings: dict[str, object], collector: Collector, tmp_path_factory: pytest.TempPathFactory, red_square: str
) -> Iterator[list[Any]]:
    """Yield the spans of three requests.

    The first request belongs to a trace of the client, and streams an answer about an image. The second has two
    choices. The third is refused.
    """
    folder = tmp_path_factory.mktemp("traced")
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test"}
    given = settings | {"spool": folder / "spool", "otlp_endpoint": collector.url}
    with running_service(given, folder / "log", environment=environment) as service:
        send_requests(service, red_square)
        yield collector.wait_for(16)
        assert service.stop() == 0
    assert "Ozymandias" not in (folder / "log").read_text()


def send_requests(service: RunningService, image: str) -> None:
    with httpx2.Client(base_url=service.url, timeout=300) as http:
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": PROMPT}]
        chat = {"messages": [{"role": "user", "content": content}], "ignore_eos": True}
        more = {"max_tokens": 5, "stream": True, "temperature": 0.5}
        http.post("/v1/chat/completions", json=chat | more, headers={"traceparent": TRACEPARENT}).raise_for_status()
        texts = {"prompt": PROMPT, "n": 2, "max_tokens": 3, "ignore_eos": True}
        http.post("/v1/completions", json=texts).raise_for_status()
        assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
        http.get("/health").raise_for_status()


def roots(spans: list[Any]) -> list[Any]:
    return [span for span in spans if span.name == "llm_request"]


def children(spans: list[Any], parent: Any) -> list[Any]:
    return [span for span in spans if span.parent_span_id == parent.span_id]


@pytest.mark.slow
def test_a_request_is_a_span_in_the_clients_trace(traced: list[Any], collector: Collector) -> None:
    first, second, refused = roots(traced)
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert second.parent_span_id == b""
    found = attributes(first)
    assert found["gen_ai.usage.prompt_tokens"] > 10
    assert found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.completion_tokens": 5,
    }
    assert {name: found[name] for name in expected} == expected
    assert attributes(second)["gen_ai.usage.completion_tokens"] == 6
    assert attributes(refused)["http.response.status_code"] == 400
    assert children(traced, refused) == []
    assert collector.resource["service.name"] == "mindie_mm"
    assert collector.resource["deployment.environment"] == "test"


@pytest.mark.slow
def test_the_stages_of_a_request_are_child_spans(traced: list[Any]) -> None:
    first, second, _ = roots(traced)
    stages = {span.name: span for span in children(traced, first)}
    assert stages.keys() == {"fetch", "preprocess", "queue", "prefill", "decode"}
    (tower,) = children(traced, stages["prefill"])
    assert tower.name == "tower"
    in_order = [stages[name] for name in ("fetch", "preprocess", "queue", "prefill", "decode")]
    for before, after in itertools.pairwise(in_order):
        assert before.start_time_unix_nano <= before.end_time_unix_nano <= after.start_time_unix_nano + 1000
    for stage in (*in_order, tower):
        assert first.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
        assert stage.end_time_unix_nano <= first.end_time_unix_nano
        assert stage.trace_id == first.trace_id
    assert abs(first.end_time_unix_nano - time.time_ns()) < 120e9
    found = [(span.name, attributes(span).get("mindie_mm.choice")) for span in children(traced, second)]
    choices = [(name, choice) for choice in (0, 1) for name in ("queue", "prefill", "decode")]
    assert sorted(found, key=str) == sorted([("preprocess", None), *choices], key=str)


def test_spans_contain_no_prompt_text(traced: list[Any]) -> None:
    dumped = " ".join(map(str, traced))
    assert "Ozymandias" not in dumped
    assert "base64" not in dumped


@pytest.mark.slow
def test_the_span_of_a_timed_out_stream_names_the_error(
    settings: dict[str, object], tmp_path: Path, red_square: str
) -> None:
    given = settings | {"spool": tmp_path / "spool", "request_timeout_s": 1}
    with collecting() as otlp, running_service(given | {"otlp_endpoint": otlp.url}, tmp_path / "log") as service:
        messages = [{"role": "user", "content": [{"image": red_square}, {"text": "What?"}]}]
        limit = service.get("/v1/models")["data"][0]["max_model_len"]
        body = {"messages": messages, "max_tokens": limit // 2, "n": 8, "ignore_eos": True, "stream": True}
        assert "took longer than" in httpx2.post(f"{service.url}/v1/chat/completions", json=body, timeout=300).text
        assert service.stop() == 0, "its last spans are sent before it ends"
        (root,) = roots(otlp.wait_for(1))
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert attributes(root)["error.type"] == "RequestTimeout"


@pytest.mark.slow
def test_an_unreachable_collector_fails_no_request_and_is_logged_once(
    settings: dict[str, object], tmp_path: Path
) -> None:
    given = settings | {"spool": tmp_path / "spool", "otlp_endpoint": "http://127.0.0.1:9/v1/traces"}
    with running_service(given, tmp_path / "log") as service:
        body = {"prompt": PROMPT, "max_tokens": 1}
        assert httpx2.post(f"{service.url}/v1/completions", json=body, timeout=300).status_code == 200
        assert service.stop() == 0
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if " opentelemetry." in line]
    assert " WARNING " in line
    assert "spans are not sent to the collector: " in line


def test_a_failing_collector_is_logged_once_a_minute() -> None:
    once = OncePerMinute()

    def passes(created: float, name: str = "opentelemetry.exporter", level: int = logging.ERROR) -> bool:
        record = logging.makeLogRecord({"name": name, "levelno": level, "msg": "no route", "created": created})
        return bool(once.filter(record))

    assert [passes(1000.0 + after_s) for after_s in (0, 1, 59, 60, 61, 130)] == [True, False, False, True, False, True]
    assert passes(1131.0, level=logging.DEBUG)
    assert passes(1131.0, name="service.access")


def test_the_sdk_is_not_imported_when_tracing_is_off() -> None:
    script = (
        "import sys, service.app, service.server; print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert ended.stdout == "[]\n"


def test_an_endpoint_without_the_extra_is_refused() -> None:
    script = """
import sys
sys.modules["opentelemetry.sdk"] = None
from service.telemetry.tracing import Tracer
Tracer("http://localhost/v1/traces", "0")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert "InputError: otlp_endpoint requires the extra otel: pip install 'mindie_mm[otel]'" in ended.stderr
