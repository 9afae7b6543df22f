"""Tests that every endpoint reads the control tokens of a prompt to which a client has applied the chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.service.conftest import TINY
from tests.service.test_tokens import tokenize
from tests.transformers_reference import AutoTokenizer

MESSAGES = [{"role": "user", "content": "What is it?"}]
MEDIA = ["<|IMAGE|>", "<|VIDEO|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def raw(reference: Any) -> str:
    """Return the messages as text, with all control tokens."""
    text: str = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    return text


def prompt_ids(http: Any, door: str, text: str, **fields: Any) -> list[int]:
    """Return the ids of the prompt `text` at the endpoint `door`."""
    if door == "/tokenize":
        return list(tokenize(http, prompt=text, **fields)["tokens"])
    if door == "/tokenize inputs":
        return list(tokenize(http, inputs=[{"text": text}], chat_template=False, **fields)["tokens"])
    if door.startswith("/v1/completions"):
        prompt = [text, text] if door.endswith("list") else text
        body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, **fields}
        choices = http.post("/v1/completions", json=body).json()["choices"]
        assert all(choice["prompt_token_ids"] == choices[0]["prompt_token_ids"] for choice in choices)
        return list(choices[0]["prompt_token_ids"])
    if door == "/tokenize inputs text":
        return list(tokenize(http, inputs=text, **fields)["tokens"])
    inputs = [{"text": text}] if door.endswith("items") else text
    parameters = {"max_new_tokens": 1, "decoder_input_details": True, "details": True, **fields}
    body = {"inputs": inputs, "chat_template": False, "parameters": parameters}
    return [token["id"] for token in http.post("/generate", json=body).json()["details"]["prefill"]]


DOORS = (
    *("/tokenize", "/tokenize inputs", "/tokenize inputs text"),
    *("/v1/completions", "/v1/completions list", "/generate", "/generate items"),
)


@pytest.mark.parametrize("door", DOORS)
def test_a_raw_prompt_has_the_ids_of_transformers(http: Any, reference: Any, raw: str, door: str) -> None:
    ids = reference(raw)["input_ids"]
    assert prompt_ids(http, door, raw) == ids == tokenize(http, messages=MESSAGES)["tokens"]
    assert prompt_ids(http, door, raw, parse_special=True) == ids
    escaped = prompt_ids(http, door, raw, parse_special=False)
    assert len(escaped) > len(ids)
    assert reference.convert_tokens_to_ids("<|im_start|>") not in escaped
    assert http.post("/detokenize", json={"tokens": escaped}).json()["prompt"] == raw


def test_answers_to_a_raw_prompt_are_those_to_the_chat(http: Any, raw: str) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    expected = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    body = {"prompt": raw, "max_tokens": 8, "temperature": 0}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
    body = {"inputs": raw, "parameters": {"max_new_tokens": 8, "details": True}}
    for door in ("/infer", "/generate"):
        assert http.post(door, json=body).json()["generated_text"] == expected
    events = http.post("/generate_stream", json=body).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data:"))["generated_text"] == expected
    body["parameters"] |= {"parse_special": False}
    short = http.post("/generate", json=body).json()["details"]["prompt_tokens"]
    assert short > tokenize(http, messages=MESSAGES)["count"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("spelled", MEDIA)
def test_text_never_becomes_media(http: Any, reference: Any, door: str, spelled: str) -> None:
    for text in (spelled, f"<|im_start|>{spelled}{spelled} a"):
        ids = prompt_ids(http, door, text)
        assert reference.convert_tokens_to_ids(spelled) not in ids
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": MESSAGES, "parse_special": True}),
        ("/tokenize", {"inputs": [{"text": "a"}], "parse_special": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "parse_special": True}),
        ("/infer", {"inputs": [{"text": "a"}], "parameters": {"parse_special": True}}),
    ],
)
def test_a_chat_does_not_parse_control_tokens(http: Any, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "parse_special"
    assert "whose texts never contain control tokens" in answer.json()["error"]["message"]


def test_the_length_of_a_prompt_beyond_the_context_is_counted(http: Any) -> None:
    context = tokenize(http, prompt="a")["max_model_len"]
    for body in ({"prompt": " a" * 5000}, {"messages": [{"role": "user", "content": " a" * 5000}]}):
        found = tokenize(http, **body)
        assert found["count"] == len(found["tokens"]) > context
    answer = http.post("/tokenize", json={"prompt": " a" * 10**6})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
