"""How the service says that it is."""

import json
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families

from tools.serving import RunningService


def test_health(http: Any) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/health/live").status_code == 200


def test_the_log_says_what_is_loaded(service: RunningService) -> None:
    first = service.log.read_text().splitlines()[0]
    assert first.endswith("assets/tiny on device auto with 1 tokenizer processes")


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny"
    assert model.object == "model"
    assert model.max_model_len > 0  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny") == model


def test_metrics_count(http: Any, red_square: str) -> None:
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


def test_shm_names_the_arenas(service: RunningService) -> None:
    found = service.shm()
    assert set(found) >= {"arenas", "blocks", "bytes"}
    for arena in found["arenas"]:
        assert arena["name"].startswith("mindie_mm-")


def test_answers_carry_a_request_id(http: Any) -> None:
    ids = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_the_api_is_described(http: Any) -> None:
    schema = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/infer", "/tokenize"} <= set(schema["paths"])
    assert "422" not in schema["paths"]["/infer"]["post"]["responses"]
    assert "messages" in json.dumps(schema["components"]["schemas"]["ChatBody"])
