"""Attacks with JSON bodies that have too many values, mistakes or characters."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mindie_mm.settings.config import ServiceConfig
from tests.attacks.conftest import MAX_PROCESSOR_S, Attacked

MOST = ServiceConfig().max_request_values
MANY = MOST - 64
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
MESSAGE = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
BATCH = {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}
Make = Callable[[], dict[str, Any]]


def names() -> dict[str, int]:
    return {f"a{index}": 1 for index in range(MANY)}


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/infer", "/v1/chat/completions", "/tokenize", "/detokenize"),
        *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/embeddings", "/rerank", "/score", "/v1/batches"),
    ],
)
@pytest.mark.parametrize("values", ["1,", "[1],", "{},"])
def test_too_many_json_values_are_413(attacked: Attacked, path: str, values: str) -> None:
    body = '{"prompt": [' + values * MOST + "1]}"
    answer, used_s, _ = attacked.watched.during(lambda: attacked.http.post(path, content=body))
    assert answer.status_code == 413
    assert f"JSON values than the limit of {MOST}" in answer.json()["error"]["message"]
    assert used_s < MAX_PROCESSOR_S
    attacked.is_right()


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("/v1/completions", lambda: {"prompt": [*[1] * MANY, "a"]}),
        ("/v1/completions", lambda: {"prompt": [*["a"] * MANY, 1]}),
        ("/v1/completions", lambda: {"prompt": [*[[1]] * (MANY // 2), ["a"]]}),
        ("/v1/completions", lambda: {"prompt": [1] * MANY}),
        ("/infer", lambda: {"inputs": [1] * MANY}),
        ("/generate", lambda: {"inputs": [1] * MANY}),
        ("/v1/chat/completions", lambda: {"messages": [1] * MANY}),
        ("/v1/chat/completions", lambda: HELLO | {"stop": [1] * MANY}),
        ("/v1/chat/completions", lambda: HELLO | {"stop_token_ids": ["a"] * MANY}),
        ("/v1/chat/completions", lambda: HELLO | {"tools": [1] * MANY}),
        ("/v1/chat/completions", lambda: HELLO | {"logit_bias": dict.fromkeys(map(str, range(MANY)), "")}),
        ("/v1/chat/completions", lambda: HELLO | {"response_format": {"type": "text"} | names()}),
        (
            "/v1/completions",
            lambda: {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": names()}},
        ),
        ("/v1/responses", lambda: {"input": [1] * MANY}),
        ("/v1/responses", lambda: {"input": [{"type": "a"}] * (MANY // 2)}),
        ("/v1/responses", lambda: {"input": [{"role": "user", "content": [1] * MANY}]}),
        ("/v1/responses", lambda: {"input": "a", "tools": [1] * MANY}),
        ("/v1/responses", lambda: {"input": "a", "text": {"format": {"type": "text"} | names()}}),
        ("/v1/responses", lambda: {"input": "a", "tool_choice": [1] * MANY}),
        ("/v1/messages", lambda: {"max_tokens": 1, "messages": [1] * MANY}),
        ("/v1/messages", lambda: {"max_tokens": 1, "messages": [{"role": "user", "content": [1] * MANY}]}),
        ("/v1/messages", lambda: MESSAGE | {"system": [1] * MANY}),
        ("/v1/messages", lambda: MESSAGE | {"tools": [1] * MANY}),
        ("/v1/messages", lambda: MESSAGE | {"stop_sequences": [1] * MANY}),
        ("/v1/batches", lambda: BATCH | {"metadata": names()}),
        ("/v1/batches", lambda: BATCH | {"input_file_id": [1] * MANY}),
        ("/v1/embeddings", lambda: {"input": [*[1] * MANY, "a"]}),
        ("/v1/embeddings", lambda: {"input": [*["a"] * MANY, 1]}),
        ("/v1/embeddings", lambda: {"input": ["a"] * MANY}),
        ("/v1/embeddings", lambda: {"messages": [[{}]] * (MANY // 4)}),
        ("/rerank", lambda: {"query": "a", "documents": ["a"] * MANY}),
        ("/rerank", lambda: {"query": "a", "documents": [{"content": []}] * (MANY // 4)}),
        ("/score", lambda: {"text_1": "a", "text_2": [*["a"] * MANY, 1]}),
        ("/tokenize", lambda: {"inputs": [1] * MANY}),
        ("/detokenize", lambda: {"tokens": ["a"] * MANY}),
    ],
)
def test_thousands_of_mistakes_are_refused_at_the_first(attacked: Attacked, path: str, make: Make) -> None:
    attacked.refused(make(), path=path)


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("/v1/chat/completions", lambda: {"messages": [{"role": "user", "content": "q w" * 10**6}]}),
        ("/v1/chat/completions", lambda: {"messages": [{"role": "user", "content": "q w" * 10}] * 15_000}),
        ("/v1/chat/completions", lambda: HELLO | {"tools": [{"type": "function", "name": "q w" * 10**6}]}),
        ("/v1/responses", lambda: {"input": "q w" * 10**6}),
        ("/v1/responses", lambda: {"input": "a", "instructions": "q w" * 10**6}),
        ("/v1/messages", lambda: MESSAGE | {"system": "q w" * 10**6}),
        ("/v1/messages/count_tokens", lambda: {"messages": [{"role": "user", "content": "q w" * 10**6}]}),
        ("/v1/completions", lambda: {"prompt": "q w" * 10**6}),
        ("/infer", lambda: {"inputs": "q w" * 10**6}),
        ("/infer", lambda: {"inputs": [{"text": "q w" * 10**6}]}),
        ("/generate", lambda: {"inputs": "q w" * 10**6}),
        ("/v1/embeddings", lambda: {"input": "q w" * 10**6}),
        ("/score", lambda: {"text_1": "a", "text_2": "q w" * 10**6}),
        ("/tokenize", lambda: {"prompt": "q w" * 10**6}),
    ],
)
def test_a_text_longer_than_any_context_is_not_tokenized(attacked: Attacked, path: str, make: Make) -> None:
    body = make()
    if "tools" in body:
        attacked.refused(body, path=path)  # the tool has no function
    else:
        attacked.refused(body, "characters", path=path)


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("/v1/chat/completions", lambda: HELLO | {"stop": "\ud800"}),
        ("/v1/responses", lambda: {"input": "\ud800"}),
        ("/v1/responses", lambda: {"input": "a", "metadata": {"a": "\ud800"}}),
        ("/v1/responses", lambda: {"input": [{"role": "user", "content": "a", "id": "\ud800"}]}),
        ("/v1/messages", lambda: MESSAGE | {"stop_sequences": ["\ud800"]}),
        ("/v1/messages", lambda: MESSAGE | {"system": "\ud800"}),
        ("/v1/completions", lambda: {"prompt": "hello", "stop": ["\ud800"]}),
        ("/v1/embeddings", lambda: {"input": "\ud800"}),
        ("/rerank", lambda: {"query": "\ud800", "documents": ["a"]}),
        ("/infer", lambda: {"inputs": "hello", "parameters": {"stop": "\ud800"}}),
        ("/generate", lambda: {"inputs": "hello", "parameters": {"stop": "\ud800"}}),
        ("/generate_stream", lambda: {"inputs": "hello", "parameters": {"stop": "\ud800"}}),
    ],
)
def test_a_lone_surrogate_is_refused(attacked: Attacked, path: str, make: Make) -> None:
    answer = attacked.http.post(path, content=json.dumps(make()), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]
    assert answer.headers["X-Request-Id"]
    attacked.is_right()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO | {"model": "m" * 10**6}),
        ("/v1/chat/completions", {"messages": [{"role": "r" * 10**6, "content": "a"}]}),
        ("/v1/responses", {"input": [{"type": "t" * 10**6}]}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "i" * 10**6}]}),
        ("/v1/responses", {"input": "a", "previous_response_id": "i" * 10**6}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "r" * 10**6, "content": "a"}]}),
    ],
)
def test_long_values_are_not_repeated_in_the_message(attacked: Attacked, path: str, body: dict[str, object]) -> None:
    not_found = "model" in body or "i" * 9 in str(body)
    assert len(attacked.refused(body, path=path, status=404 if not_found else 400)) < 1000
