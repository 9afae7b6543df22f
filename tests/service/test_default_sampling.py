"""Tests that generation_config.json provides the values of fields that a request leaves out."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.warm import running_service
from tools.serving import RunningService

DEFAULTS = {"do_sample": True, "temperature": 1e-6, "top_k": 1, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("greedy")
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    with running_service(
        settings | {"spool": folder / "spool", "generation_config": folder}, folder / "log"
    ) as running:
        yield running


def answer(service: RunningService, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx2.post(service.url + path, json=body, timeout=300)
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


def test_a_chat_without_parameters_uses_the_defaults(greedy: RunningService) -> None:
    body = {"messages": [{"role": "user", "content": "What?"}]}
    answers = [answer(greedy, "/v1/chat/completions", body) for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"], "a top_k of 1 leaves no choice"
    assert answers[0]["usage"]["completion_tokens"] <= 3


def test_parameters_of_a_request_override_the_defaults(greedy: RunningService) -> None:
    body = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 9, "ignore_eos": True}
    assert answer(greedy, "/v1/chat/completions", body)["usage"]["completion_tokens"] == 9
    drawn = {
        answer(greedy, "/v1/completions", {"prompt": "a", "temperature": 2, "top_k": top_k, "seed": seed})["choices"][
            0
        ]["text"]
        for top_k in (0, -1)
        for seed in range(4)
    }
    assert len(drawn) > 1, "0 and -1 take all tokens"


def test_the_defaults_are_logged_once_at_start(greedy: RunningService) -> None:
    lines = [line for line in greedy.log.read_text().splitlines() if "default sampling parameters" in line]
    assert len(lines) == 1
    assert "temperature 1e-06, top_k 1, max_tokens 3 (--generation-config " in lines[0]
