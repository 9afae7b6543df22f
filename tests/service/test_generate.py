"""Tests for /generate and /generate_stream with MindIE's request formats."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from service.routes.generate import GenerateBody

WHAT = "What is in the image?"
FORMS = ("/infer", "/generate", "/generate_stream")


def generate(http: Any, inputs: Any, *, path: str = "/generate", **parameters: Any) -> Any:
    return http.post(path, json={"inputs": inputs, "parameters": {"max_new_tokens": 24} | parameters})


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        generated: str = events(answer)[-1]["generated_text"]
        return generated
    return answer.json()["generated_text"]  # type: ignore[no-any-return]


def events(answer: Any) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize("path", FORMS)
def test_items_in_our_form_and_the_openai_form_are_answered(http: Any, media_dir: Path, path: str) -> None:
    file = str(media_dir / "green_star.jpg")
    ours = [{"image": file}, {"text": WHAT}]
    theirs = [{"type": "image_url", "image_url": file}, {"type": "text", "text": WHAT}]
    nested = [{"type": "image_url", "image_url": {"url": f"file://{file}"}}, {"type": "text", "text": WHAT}]
    assert [text(generate(http, items, path=path)) for items in (ours, theirs, nested)] == ["green star"] * 3


@pytest.mark.parametrize("path", FORMS)
def test_an_image_within_a_text_is_an_item(http: Any, media_dir: Path, path: str) -> None:
    raw = base64.b64encode((media_dir / "green_star.jpg").read_bytes()).decode()
    inputs = f'See <img src="data:image/jpeg;base64,{raw}"> {WHAT}'
    same = [{"text": "See "}, {"image": raw}, {"text": f" {WHAT}"}]
    apart = http.post("/infer", json={"inputs": same, "chat_template": False, "parameters": {"max_new_tokens": 24}})
    assert text(generate(http, inputs, path=path)) == text(apart)
    if path == "/generate":
        details = generate(http, inputs, path=path, details=True).json()["details"]
        spelled = http.post("/tokenize", json={"inputs": [{"image": raw}]}).json()["count"]
        assert spelled > 16
        assert details["prompt_tokens"] > spelled - 16, "the image is an item, not text"
        assert details["prompt_tokens"] < len(raw) // 4


def test_an_answer_has_only_its_text_by_default(http: Any, red_square: str) -> None:
    answer = generate(http, [{"image": red_square}, {"text": WHAT}])
    assert answer.json() == {"generated_text": "red square"}


def test_details_describe_the_generated_tokens(http: Any) -> None:
    answer = generate(http, "What colour", details=True, max_new_tokens=1).json()
    details = answer["details"]
    assert set(details) == {"prompt_tokens", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 1, None)
    assert details["prefill"] == []
    assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"]
    assert all(token["logprob"] is None and token["special"] is None for token in details["tokens"])


def test_decoder_input_details_list_the_tokens_of_the_prompt(http: Any) -> None:
    details = generate(http, "What colour", decoder_input_details=True, max_new_tokens=1).json()["details"]
    assert "".join(token["text"] for token in details["prefill"]) == "What colour"
    assert details["prompt_tokens"] == len(details["prefill"])
    assert generate(http, "What colour", path="/generate_stream", decoder_input_details=True).status_code == 400


def test_return_full_text_puts_a_text_prompt_first(http: Any) -> None:
    answer = text(generate(http, "What colour"))
    assert text(generate(http, "What colour", return_full_text=True)) == "What colour" + answer
    assert generate(http, [{"text": "What colour"}], return_full_text=True).status_code == 400


def test_truncate_cuts_the_prompt(http: Any) -> None:
    long = "red square " * 50
    details = generate(http, long, truncate=7, details=True, max_new_tokens=1).json()["details"]
    assert details["prompt_tokens"] == 7


def test_a_drawn_seed_is_reported_and_reproduces_the_answer(http: Any) -> None:
    drawn = generate(http, "What colour", temperature=50.0, details=True).json()
    seed = drawn["details"]["seed"]
    assert isinstance(seed, int)
    assert generate(http, "What colour", temperature=50.0, details=True, seed=seed).json() == drawn
    assert generate(http, "What colour", temperature=50.0, details=True).json()["details"]["seed"] != seed


def test_a_stream_ends_with_the_whole_text_and_details(http: Any, red_square: str) -> None:
    items = [{"image": red_square}, {"text": WHAT}]
    streamed = events(generate(http, items, path="/generate_stream", details=True))
    assert all(set(event) == {"token", "generated_text", "details"} for event in streamed)
    assert all(event["generated_text"] is None and event["details"] is None for event in streamed[:-1])
    assert streamed[-1]["generated_text"] == "red square" == "".join(event["token"]["text"] for event in streamed)
    assert streamed[-1]["details"]["finish_reason"] == "eos_token"
    assert streamed[-1]["details"]["generated_tokens"] == sum(len(event["token"]["id"]) for event in streamed)
    bare = events(generate(http, items, path="/generate_stream"))
    assert bare[-1]["details"] is None


def test_a_stop_string_ends_the_text(http: Any, red_square: str) -> None:
    items = [{"image": red_square}, {"text": WHAT}]
    answer = generate(http, items, stop=" square", details=True).json()
    assert answer["generated_text"] == "red"
    assert answer["details"]["finish_reason"] == "stop_sequence"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0},
        {"top_p": 1.5},
        {"max_new_tokens": True},
        {"max_new_tokens": 2.5},
        {"truncate": 0},
        {"seed": 2**63},
        {"adapter_id": "lora"},
        {"stop": ["x"] * 17},
    ],
)
def test_invalid_parameters_are_refused_by_name(http: Any, path: str, parameters: dict[str, Any]) -> None:
    answer = generate(http, "x", path=path, **parameters)
    assert answer.status_code == 400
    assert next(iter(parameters)) in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    "field", [{"truncate": 2}, {"decoder_input_details": True}, {"return_full_text": True}, {"adapter_id": "lora"}]
)
def test_a_parameter_outside_parameters_is_refused(http: Any, path: str, field: dict[str, Any]) -> None:
    answer = http.post(path, json={"inputs": "What colour"} | field)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{min(field)} must be inside parameters"


@pytest.mark.parametrize("inputs", [[], "", [{"image": "/etc/passwd"}], 5, None, [{"text": 5}]])
def test_invalid_inputs_are_refused(http: Any, inputs: Any) -> None:
    assert generate(http, inputs).status_code == 400
    assert generate(http, inputs, path="/generate_stream").status_code == 400


def test_details_contain_timings_on_request(http: Any, red_square: str) -> None:
    for path in ("/infer", "/generate"):
        answer = generate(http, [{"image": red_square}, {"text": WHAT}], path=path, details=True, timings=True)
        assert answer.json()["details"]["timings"]["total_s"] > 0


def test_a_text_is_not_searched_for_token_ids() -> None:
    """A text of megabytes would keep the event loop busy for seconds."""

    class Text(str):
        __slots__ = ()
        __iter__ = None

    assert GenerateBody.model_construct(inputs=Text("a text")).token_ids is None
