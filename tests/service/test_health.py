"""Tests for health checks, metrics and startup logs."""

import json
import os
import re
import time
from importlib.metadata import version
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mindie_mm.errors import ArenaFull, SegmentMissing, StaleReference
from mindie_mm.shm.reclaim import CAUSES
from service.telemetry.metrics import Metrics
from tools.serving import RunningService


def test_health_reports_the_arena(http: Any) -> None:
    answer = http.get("/health")
    assert answer.status_code == 200
    health = answer.json()
    assert health["status"] == "ok"
    (arena,) = health["shared_memory"]["arenas"]
    assert arena["name"].startswith("mindie_mm-")
    assert 0 <= arena["populated"] <= 1
    assert health["shared_memory"]["populated"] == pytest.approx(arena["populated"])
    assert http.get("/health/live").status_code == 200


def test_the_health_probes_of_mindie_and_vllm_are_served(http: Any) -> None:
    for path in ("/v2/health/ready", "/ping"):
        assert http.get(path).json()["status"] == "ok"
    assert http.get("/v2/health/live").status_code == 200
    assert http.get("/version").json() == {"version": version("mindie_mm")}


def test_the_load_is_the_number_of_requests_in_progress(http: Any) -> None:
    body = {"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert http.get("/load").json()["server_load"] >= 1  # a request of another test may be ending


@pytest.mark.parametrize("path", ["/health", "/health/live", "/", "/static/api.js", "/metrics", "/v1/models"])
def test_head_equals_get_without_the_body(http: Any, path: str) -> None:
    head, whole = http.head(path), http.get(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers.keys() == whole.headers.keys()
    assert http.get("/health").json()["status"] == "ok", "the connection goes on"
    counted = re.escape(f'http_requests_total{{handler="{path.replace("api.js", "{name:path}")}",method="HEAD"')
    assert re.search(counted, http.get("/metrics").text)


def test_the_arena_is_faulted_in_completely_after_a_while(http: Any) -> None:
    deadline = time.monotonic() + 60
    while (found := http.get("/health").json()["shared_memory"]["populated"]) < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == 1


def test_the_log_names_the_loaded_model(service: RunningService, device: str) -> None:
    log = service.log.read_text()
    assert re.search(rf"service.server: loading \S+/assets/tiny on device {device} with \d+ decoders?\n", log)


def test_the_engine_runs_on_the_requested_device(http: Any, device: str) -> None:
    (found,) = re.findall(r'mindie_mm:build_info{.*device="(\w+)', http.get("/metrics").text)
    assert found == device


def test_the_log_names_the_source_of_each_setting_that_is_not_at_its_default(service: RunningService) -> None:
    (line,) = re.findall(r"mindie_mm\.settings: (.*)\n", service.log.read_text())
    sources = dict(re.findall(r"(\w+) = [^()]* \(([^()]*)\)", line))
    assert sources["arena_bytes"] == "--arena-bytes"
    assert sources["model"] == "argument"
    assert "max_request_values" not in sources
    assert "port = 0 (--port)" in line


def test_models_lists_the_loaded_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny"
    assert model.object == "model"
    assert model.max_model_len > 0  # type: ignore[attr-defined]
    assert model.note.startswith("demo model: ")  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny") == model


QUERIES, HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"


def test_metrics_count_a_request(http: Any, red_square: str) -> None:
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    before = read()
    messages = [{"role": "user", "content": [{"image": red_square}, {"text": "What colour"}]}]
    http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "ignore_eos": True})
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["mindie_mm:generation_tokens_total"] == 4
    assert grown["mindie_mm:prompt_tokens_total"] > 0
    assert grown["mindie_mm:time_to_first_token_seconds_count"] == 1
    assert grown["mindie_mm:e2e_request_latency_seconds_count"] == 1
    assert grown["mindie_mm:request_prefill_time_seconds_count"] == 1
    parts = ("tokenize", "queue", "prefill", "decode")
    spent_s = sum(grown[f"mindie_mm:request_{part}_time_seconds_sum"] for part in parts)
    assert grown["mindie_mm:e2e_request_latency_seconds_sum"] > spent_s, "latency counts from the request's arrival"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"mindie_mm:{name}" in after


def test_a_repeated_prompt_is_reported_as_cached(http: Any) -> None:
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    body = {"messages": [{"role": "user", "content": "What colour is it? " * 40}], "max_tokens": 2, "n": 2}
    http.post("/v1/chat/completions", json=body)
    before = read()
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 16 <= cached < usage["prompt_tokens"]
    after = read()
    grown = {name: after[f"mindie_mm:{name}"] - before[f"mindie_mm:{name}"] for name in (QUERIES, HITS)}
    assert grown == {QUERIES: 2 * usage["prompt_tokens"], HITS: 2 * cached}


def test_metrics_report_shared_memory(http: Any, service: RunningService, red_square: str) -> None:
    def read() -> dict[str, dict[str, float]]:
        """Return the values of all metrics, by name and then by the label that distinguishes the series."""
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for sample in family.samples:
                key = next((sample.labels[name] for name in ("kind", "cause", "state") if name in sample.labels), "")
                found.setdefault(sample.name.removeprefix("mindie_mm:"), {})[key] = sample.value
        return found

    before = read()
    messages = [{"role": "user", "content": [{"image": red_square}, {"text": "What colour"}]}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200
    service.wait_until_free()
    after = read()
    assert after["shm_allocations_total"][""] == before["shm_allocations_total"][""] + 1
    assert after["shm_capacity_bytes"][""] == 64 << 20
    assert 0 < after["shm_peak_bytes"][""] <= 64 << 20
    assert after["shm_used_bytes"][""] == 0
    assert after["shm_blocks"] == {"filling": 0, "published": 0}
    assert after["shm_oldest_block_age_seconds"][""] == 0
    assert after["shm_bad_references_total"].keys() == {"stale", "corrupt", "missing"}
    assert after["shm_reclaimed_total"].keys() == after["shm_reclaimed_bytes_total"].keys() == set(CAUSES)
    space = os.statvfs("/dev/shm")
    assert after["shm_filesystem_bytes"][""] == space.f_blocks * space.f_frsize
    assert 0 < after["shm_filesystem_free_bytes"][""] < after["shm_filesystem_bytes"][""]
    assert after["shm_full_total"][""] == 0
    assert {"shm_waits_total", "shm_taken_back_total", "shm_populated_ratio"} <= after.keys()


def test_the_longest_choice_of_each_prompt_is_measured(http: Any) -> None:
    def read() -> list[float]:
        """Return the count and the sum of the histogram."""
        lines = re.findall(r"request_max_num_generation_tokens_(count|sum){.*} (.*)", http.get("/metrics").text)
        return [float(value) for _, value in sorted(lines)]

    before = read()
    http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "ignore_eos": True})
    assert read() == [before[0] + 2, before[1] + 6]


def test_bad_references_are_counted_by_kind() -> None:
    metrics = Metrics("m")
    for error in (StaleReference("s"), SegmentMissing("m"), SegmentMissing("m"), ArenaFull("f")):
        metrics.count_error(error)
    text = metrics.text().decode()
    for kind, number in (("stale", 1), ("missing", 2), ("corrupt", 0)):
        assert f'mindie_mm:shm_bad_references_total{{kind="{kind}",model_name="m"}} {number}.0' in text


def test_the_shm_endpoint_names_the_arenas(service: RunningService) -> None:
    found = service.shm()
    assert set(found) >= {"arenas", "blocks", "bytes"}
    for arena in found["arenas"]:
        assert arena["name"].startswith("mindie_mm-")


def test_each_answer_carries_its_own_request_id(http: Any) -> None:
    ids = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_the_openapi_schema_covers_the_endpoints(http: Any) -> None:
    schema = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/infer", "/tokenize"} <= set(schema["paths"])
    assert "422" not in schema["paths"]["/infer"]["post"]["responses"]
    assert "messages" in json.dumps(schema["components"]["schemas"]["ChatBody"])
