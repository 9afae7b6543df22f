"""Tests for /tokenize and /detokenize."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.service.conftest import TINY
from tools.serving import RunningService


def tokenize(http: Any, **body: Any) -> dict[str, Any]:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    tokenized: dict[str, Any] = answer.json()
    return tokenized


@pytest.mark.parametrize("prompt", ["What colour is it?", "<|IMAGE|>", "naïve 日本語 🎉", " ", "<|im_end|>"])
def test_a_text_survives_tokenize_and_detokenize(http: Any, prompt: str) -> None:
    found = tokenize(http, prompt=prompt, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": prompt}


def test_a_chat_with_an_image_has_plain_ids(service: RunningService, http: Any, red_square: str) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": red_square}}, {"text": "What?"}]}
    ]
    found = tokenize(http, messages=messages)
    assert found["max_model_len"] > found["count"]
    assert all(token >= 0 for token in found["tokens"]), "words were replaced by placeholders"
    text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text.count("<|IMAGE|>") > 1
    assert text.endswith("assistant\n")
    whole = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert whole["usage"]["prompt_tokens"] == found["count"]
    assert service.wait_until_free()["blocks"] == 0


def test_the_generation_prompt_can_be_left_out(http: Any) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    with_prompt = tokenize(http, messages=messages)["tokens"]
    without = tokenize(http, messages=messages, add_generation_prompt=False)["tokens"]
    assert with_prompt[: len(without)] == without
    assert len(without) < len(with_prompt)
    nulls = tokenize(http, messages=messages, add_generation_prompt=None, return_token_strs=None)
    assert nulls["tokens"] == with_prompt
    assert nulls["token_strs"] is None


def test_unsupported_prompt_options_are_refused(http: Any) -> None:
    message = "mm_processor_kwargs has the key 'num_crops'"
    body = {"messages": [{"role": "user", "content": "Hello!"}], "mm_processor_kwargs": {"num_crops": 9}}
    for path in ("/tokenize", "/v1/chat/completions"):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert message.partition(" is ")[0] in answer.json()["error"]["message"]
    assert message in http.post("/tokenize", json=body).json()["error"]["message"]


def test_options_that_do_not_change_the_prompt_are_accepted(http: Any) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    assert tokenize(http, messages=messages, reasoning_effort="low") == tokenize(http, messages=messages)
    off = {"tools": None, "tool_choice": "none", "continue_final_message": False, "add_special_tokens": False}
    assert tokenize(http, messages=messages, **off) == tokenize(http, messages=messages)
    assert tokenize(http, prompt="Hello!", add_special_tokens=True) == tokenize(http, prompt="Hello!")
    assert tokenize(http, prompt="Hello!", add_special_tokens=False) == tokenize(http, prompt="Hello!"), (
        "this tokenizer adds none"
    )


def test_token_strings_are_vocabulary_entries(http: Any) -> None:
    """A token may begin with a space, or may be only a part of a character."""
    vocabulary = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    found = tokenize(http, prompt="red square 日本 🎉", return_token_strs=True)
    assert found["token_strs"] == [vocabulary.id_to_token(token) for token in found["tokens"]]
    assert not any("\ufffd" in piece for piece in found["token_strs"])
    assert any("Ġ" in piece for piece in found["token_strs"])


def test_inputs_of_infer_are_accepted(http: Any, media_dir: Path) -> None:
    found = tokenize(http, inputs=[{"image": str(media_dir / "green_star.jpg")}, {"text": "What?"}])
    assert found["count"] > 10


@pytest.mark.parametrize("chat_template", [None, True, False])
def test_inputs_have_the_same_prompt_as_generate(http: Any, chat_template: bool | None) -> None:
    body = {"inputs": [{"text": "Hello!"}], "chat_template": chat_template}
    answer = http.post("/generate", json=body | {"parameters": {"max_new_tokens": 1, "details": True}})
    assert tokenize(http, **body)["count"] == answer.json()["details"]["prompt_tokens"]
    plain = tokenize(http, prompt="Hello!")["tokens"]
    assert (tokenize(http, **body)["tokens"] == plain) == (chat_template is False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "Hello!", "chat_template": False}, "chat_template is False, but there are no inputs"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": True}, "is True, but there are no inputs"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages }}"}, "must be true or false"),
        ({"inputs": [{"text": "a"}], "chat_template": 0}, "must be true or false"),
    ],
)
def test_a_chat_template_of_the_wrong_type_or_place_is_refused(http: Any, body: dict[str, Any], message: str) -> None:
    answer = http.post("/tokenize", json=body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "inputs": [{"text": "b"}]},
        {"prompt": "a", "inputs": "b"},
        {"inputs": ""},
        {"prompt": 5},
        {"messages": []},
    ],
)
def test_a_body_needs_exactly_one_valid_prompt(http: Any, body: dict[str, Any]) -> None:
    assert http.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [10**9], [1.5], ["1"], [True], None, 5])
def test_detokenize_refuses_invalid_token_ids(http: Any, tokens: Any) -> None:
    assert http.post("/detokenize", json={"tokens": tokens}).status_code == 400
