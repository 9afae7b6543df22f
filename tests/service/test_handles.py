"""Tests for token ids with handles, which only clients of the Unix socket may send."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from mindie_mm import Tokenizer
from mindie_mm.errors import InputError
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.shm import release
from mindie_mm.tokenize.prompt import Prompt
from service.request.token_text import prompt_text
from tests.service.conftest import TINY

FORMS = ("/v1/completions", "/generate", "/generate_stream")


@pytest.fixture(scope="module")
def tokenizer(media_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    with Tokenizer.from_pretrained(TINY) as tokenizer:
        first = tmp_path_factory.mktemp("first") / "shm_name.txt"
        tokenizer.tokenize([{"image": str(media_dir / "green_star.jpg")}], first)  # creates the arena
        release(first)
        yield tokenizer


@pytest.fixture
def ids(tokenizer: Tokenizer, media_dir: Path, tmp_path: Path) -> Iterator[list[int]]:
    """Yield the ids of a question about an image, which the service has never seen."""
    content = [{"image": str(media_dir / "green_star.jpg")}, {"text": "What is in the image?"}]
    yield tokenizer.tokenize_chat([{"role": "user", "content": content}], tmp_path / "shm_name.txt").tolist()
    release(tmp_path / "shm_name.txt")


def ask(http: Any, path: str, ids: Any, **changes: Any) -> Any:
    if path == "/v1/completions":
        return http.post(path, json={"prompt": ids, "max_tokens": 8, "temperature": 0} | changes)
    return http.post(path, json={"inputs": ids, "parameters": {"max_new_tokens": 8} | changes})


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.split("data: ")[-1]
        return str(json.loads(last)["generated_text"])
    body = answer.json()
    return str(body["generated_text"] if "generated_text" in body else body["choices"][0]["text"])


def message(answer: Any) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("path", FORMS)
def test_ids_with_handles_are_answered_on_the_unix_socket_alone(
    http: Any, unix_http: Any, ids: list[int], tmp_path: Path, path: str
) -> None:
    assert text(ask(unix_http, path, ids)) == "green star"
    forwarded = {"Forwarded": "for=unix:", "X-Forwarded-For": "unix:", "Host": "localhost"}
    refused = http.post(path, json={"prompt": ids, "inputs": ids}, headers=forwarded)
    assert "handles are accepted only on the socket of --uds" in message(refused)
    release(tmp_path / "shm_name.txt")
    beams = [{"use_beam_search": True, "n": 2}] if path == "/v1/completions" else []
    for changes in ({}, *beams):
        assert "a handle of the prompt cannot be used: Ref(" in message(ask(unix_http, path, ids, **changes))
    plain = http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    assert text(ask(http, path, plain)) == text(ask(unix_http, path, plain)) == text(ask(http, path, "Hello"))


def test_handles_in_several_prompts_are_answered(unix_http: Any, ids: list[int]) -> None:
    answer = ask(unix_http, "/v1/completions", [ids, ids], n=2, prompt_logprobs=0)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["green star"] * 4
    assert answer.json()["usage"]["prompt_tokens"] == 2 * len(ids)
    assert len(answer.json()["choices"][0]["prompt_logprobs"]) == len(ids)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", {"echo": True}),
        ("/v1/completions", {"return_token_ids": True}),
        ("/v1/completions", {"truncate_prompt_tokens": 9}),
        ("/generate", {"decoder_input_details": True}),
        ("/generate", {"truncate": 9}),
    ],
)
def test_fields_that_need_the_ids_of_placeholders_are_refused(
    unix_http: Any, ids: list[int], path: str, field: dict[str, Any]
) -> None:
    name = next(iter(field))
    assert f"{name} is not supported with handles" in message(ask(unix_http, path, ids, **field))


@pytest.mark.parametrize("bad", [-1, -(2**63), -(2**63) - 1, -(10**30), 10**6, 2**63])
def test_wrong_ids_on_the_unix_socket_are_refused(unix_http: Any, bad: int) -> None:
    for path in FORMS:
        assert message(ask(unix_http, path, [5, bad, 6]))


def test_other_routes_refuse_handles_on_the_unix_socket(unix_http: Any, ids: list[int]) -> None:
    assert "handles" in message(unix_http.post("/detokenize", json={"tokens": ids}))
    assert unix_http.post("/infer", json={"inputs": ids}).status_code == 400


def test_a_logged_prompt_has_its_text_without_the_handles(ids: list[int]) -> None:
    text = prompt_text(Backend.from_file(str(TINY / "tokenizer.json")), Prompt(np.array(ids)))
    assert "What is in the image?" in text
    assert "-" not in text


def test_the_socket_is_for_the_user_alone(service: Any, unix_http: Any) -> None:
    status = service.log.with_name("socket").stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert unix_http.get("/health").status_code == 200


def test_handles_without_a_unix_socket_are_refused_at_the_start() -> None:
    with pytest.raises(InputError, match="accept_handles is on, but uds is not set"):
        ServiceConfig(accept_handles=True)
