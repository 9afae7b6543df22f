"""Attacks with JSON bodies that have too many values, mistakes or characters."""

from __future__ import annotations

import json

import pytest

from mindie_mm.settings.config import ServiceConfig
from tests.attacks.conftest import MAX_PROCESSOR_S, Attacked

MOST = ServiceConfig().max_request_values
MANY = MOST - 64
NAMES = {f"a{index}": 1 for index in range(MANY)}
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.mark.parametrize("path", ["/v1/completions", "/infer", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("values", ["1,", "[1],", "{},"])
def test_too_many_json_values_are_413(attacked: Attacked, path: str, values: str) -> None:
    body = '{"prompt": [' + values * MOST + "1]}"
    answer, used_s, _ = attacked.watched.during(lambda: attacked.http.post(path, content=body))
    assert answer.status_code == 413
    assert f"JSON values than the limit of {MOST}" in answer.json()["error"]["message"]
    assert used_s < MAX_PROCESSOR_S
    attacked.is_right()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [*[1] * MANY, "a"]}),
        ("/v1/completions", {"prompt": [*["a"] * MANY, 1]}),
        ("/v1/completions", {"prompt": [*[[1]] * (MANY // 2), ["a"]]}),
        ("/v1/completions", {"prompt": [1] * MANY}),
        ("/infer", {"inputs": [1] * MANY}),
        ("/generate", {"inputs": [1] * MANY}),
        ("/v1/chat/completions", {"messages": [1] * MANY}),
        ("/v1/chat/completions", HELLO | {"stop": [1] * MANY}),
        ("/v1/chat/completions", HELLO | {"stop_token_ids": ["a"] * MANY}),
        ("/v1/chat/completions", HELLO | {"tools": [1] * MANY}),
        ("/v1/chat/completions", HELLO | {"logit_bias": dict.fromkeys(map(str, range(MANY)), "")}),
        ("/v1/chat/completions", HELLO | {"response_format": {"type": "text"} | NAMES}),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": NAMES}}),
        ("/tokenize", {"inputs": [1] * MANY}),
        ("/detokenize", {"tokens": ["a"] * MANY}),
    ],
)
def test_thousands_of_mistakes_are_refused_at_the_first(attacked: Attacked, path: str, body: dict[str, object]) -> None:
    attacked.refused(body, path=path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q w" * 10**6}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q w" * 10}] * 15_000}),
        ("/v1/chat/completions", HELLO | {"tools": [{"type": "function", "name": "q w" * 10**6}]}),
        ("/v1/completions", {"prompt": "q w" * 10**6}),
        ("/infer", {"inputs": "q w" * 10**6}),
        ("/infer", {"inputs": [{"text": "q w" * 10**6}]}),
        ("/generate", {"inputs": "q w" * 10**6}),
        ("/tokenize", {"prompt": "q w" * 10**6}),
    ],
)
def test_a_text_longer_than_any_context_is_not_tokenized(
    attacked: Attacked, path: str, body: dict[str, object]
) -> None:
    if "tools" in body:
        attacked.refused(body, path=path)  # the tool has no function
    else:
        attacked.refused(body, "characters", path=path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO | {"stop": "\ud800"}),
        ("/v1/completions", {"prompt": "hello", "stop": ["\ud800"]}),
        ("/infer", {"inputs": "hello", "parameters": {"stop": "\ud800"}}),
        ("/generate", {"inputs": "hello", "parameters": {"stop": "\ud800"}}),
        ("/generate_stream", {"inputs": "hello", "parameters": {"stop": "\ud800"}}),
    ],
)
def test_a_lone_surrogate_is_refused(attacked: Attacked, path: str, body: dict[str, object]) -> None:
    answer = attacked.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]
    assert answer.headers["X-Request-Id"]
    attacked.is_right()


@pytest.mark.parametrize(
    "body", [HELLO | {"model": "m" * 10**6}, {"messages": [{"role": "r" * 10**6, "content": "a"}]}]
)
def test_long_values_are_not_repeated_in_the_message(attacked: Attacked, body: dict[str, object]) -> None:
    attacked.refused(body, status=404 if "model" in body else 400)
