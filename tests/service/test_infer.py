"""Tests for /infer with MindIE's request formats."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

WHAT = "What is in the image?"


def infer(http: Any, inputs: Any, *, stream: bool = False, **parameters: Any) -> Any:
    body = {"inputs": inputs, "stream": stream, "parameters": {"max_new_tokens": 24} | parameters}
    return http.post("/infer", json=body)


def test_items_are_answered_through_the_chat_template(http: Any, media_dir: Path) -> None:
    answer = infer(http, [{"image": str(media_dir / "green_star.jpg")}, {"text": WHAT}])
    assert answer.status_code == 200
    assert answer.json() == {"generated_text": "green star"}


def test_items_in_the_openai_form_are_answered_with_details(http: Any, red_square: str) -> None:
    items = [{"type": "image_url", "image_url": red_square}, {"type": "text", "text": WHAT}]
    answer = infer(http, items, details=True, seed=5).json()
    assert answer["generated_text"] == infer(http, [{"image": red_square}, {"text": WHAT}]).json()["generated_text"]
    details = answer["details"]
    assert details["finish_reason"] in ("eos_token", "length")
    assert details["seed"] == 5
    assert details["generated_tokens"] == len(details["generated_token_ids"])


def test_a_video_is_answered(http: Any, media_dir: Path) -> None:
    items = [{"video": str(media_dir / "right.mp4")}, {"text": "Which way does the shape move?"}]
    assert infer(http, items).json() == {"generated_text": "right"}


def test_a_text_is_completed_without_a_template(http: Any) -> None:
    answer = infer(http, "What colour", details=True, max_new_tokens=3).json()
    same = http.post("/v1/completions", json={"prompt": "What colour", "temperature": 0, "max_tokens": 3}).json()
    assert answer["generated_text"] == same["choices"][0]["text"]


def test_chat_template_false_leaves_the_template_out(http: Any) -> None:
    raw = http.post("/infer", json={"inputs": [{"text": "What "}, {"text": "colour"}], "chat_template": False})
    assert raw.json() == infer(http, "What colour", max_new_tokens=20).json()
    null = http.post("/infer", json={"inputs": [{"text": "What colour"}], "chat_template": None})
    assert null.json() == infer(http, [{"text": "What colour"}], max_new_tokens=20).json()


def test_a_stream_has_times_tokens_and_the_whole_text(http: Any, red_square: str) -> None:
    answer = infer(http, [{"image": red_square}, {"text": WHAT}], stream=True, details=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in answer.text.splitlines() if line)
    assert events[0]["prefill_time"] > 0
    assert events[0]["decode_time"] is None
    assert all(event["prefill_time"] is None and event["decode_time"] >= 0 for event in events[1:])
    assert all(set(event) == {"prefill_time", "decode_time", "token"} for event in events[:-1])
    whole = infer(http, [{"image": red_square}, {"text": WHAT}]).json()
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert events[-1]["token"]["text"] is None
    assert events[-1]["details"]["generated_tokens"] == sum(len(event["token"]["id"]) for event in events)


def test_do_sample_false_overrides_the_temperature(http: Any) -> None:
    greedy = infer(http, "What colour", do_sample=False, temperature=50.0, seed=1).json()
    assert greedy == infer(http, "What colour").json()
    drawn = {infer(http, "What colour", temperature=50.0, seed=seed).json()["generated_text"] for seed in (1, 2, 3)}
    assert len(drawn) > 1


def test_do_sample_draws_although_the_checkpoint_is_greedy_by_default(http: Any) -> None:
    body = {"prompt": "What colour", "max_tokens": 20}
    answers = {http.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2)}
    assert answers == {infer(http, "What colour", max_new_tokens=20).json()["generated_text"]}
    drawn = {infer(http, "What colour", do_sample=True, seed=seed).json()["generated_text"] for seed in range(4)}
    assert len(drawn) > 1


def test_a_drawn_seed_is_reported_and_reproduces_the_answer(http: Any) -> None:
    drawn = infer(http, "What colour", do_sample=True, temperature=50.0, details=True).json()
    seed = drawn["details"]["seed"]
    assert infer(http, "What colour", do_sample=True, temperature=50.0, details=True, seed=seed).json() == drawn
    assert infer(http, "What colour", do_sample=True, details=True).json()["details"]["seed"] not in (seed, None)
    assert infer(http, "What colour", details=True).json()["details"]["seed"] is None


@pytest.mark.parametrize("path", ["/infer", "/generate", "/generate_stream"])
def test_unsupported_parameters_that_would_change_the_answer_are_refused(http: Any, path: str) -> None:
    def ask(**parameters: Any) -> Any:
        return http.post(path, json={"inputs": "What colour", "parameters": {"max_new_tokens": 2} | parameters})

    for name, value in (
        ("grammar", {"type": "regex", "value": "a"}),
        ("best_of", 2),
        ("top_n_tokens", 3),
        ("frequency_penalty", 0.5),
        ("skip_special_tokens", False),
        ("max_tokens", 2),
        ("max_completion_tokens", 2),
    ):
        answer = ask(**{name: value})
        assert answer.status_code == 400
        assert f"{name} is not supported" in answer.json()["error"]["message"]
    harmless = {"grammar": None, "best_of": 1, "top_n_tokens": 0, "frequency_penalty": 0.0, "skip_special_tokens": True}
    ignored = {"typical_p": 0.5, "watermark": True, "priority": 3}
    assert ask(**harmless, **ignored).status_code == 200


@pytest.mark.parametrize("path", ["/infer", "/generate", "/generate_stream"])
def test_a_parameter_outside_parameters_is_refused(http: Any, path: str) -> None:
    for field in ({"max_new_tokens": 3}, {"do_sample": True}, {"stop": "x"}):
        answer = http.post(path, json={"inputs": "What colour"} | field)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"{min(field)} must be inside parameters"
    harmless = {"max_new_tokens": None, "max_tokens": None, "n": 1, "ignore_eos": False, "chat_template": True}
    whole = {"inputs": "What colour", "parameters": {"max_new_tokens": 2}} | harmless
    assert http.post(path, json=whole).status_code == 200


@pytest.mark.parametrize("path", ["/infer", "/generate", "/generate_stream"])
@pytest.mark.parametrize(
    "field",
    [
        {"grammar": {"type": "regex", "value": "a"}},
        {"frequency_penalty": 1.5},
        {"n": 3},
        {"ignore_eos": True},
        {"mm_processor_kwargs": {"max_pixels": 9}},
        {"max_tokens": 2},
    ],
)
def test_an_unsupported_field_outside_parameters_is_refused(http: Any, path: str, field: dict[str, Any]) -> None:
    answer = http.post(path, json={"inputs": "What colour"} | field)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{min(field)} is not supported")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "empty"),
        ("", "empty"),
        ([{"image": "/etc/passwd"}], r"media item 0 \(image\): there is no such file"),
        ([{"image": "x", "text": "y"}], r"inputs\[0\]"),
        ([{"text": 5}], r"inputs\[0\].text"),
        ([{"audio": "data:audio/wav;base64,UklGRiQAAABXQVZF"}, {"text": "?"}], "audio"),
        (5, "inputs"),
        (None, "inputs"),
    ],
)
def test_invalid_inputs_are_refused_by_name(http: Any, inputs: Any, message: str) -> None:
    answer = infer(http, inputs)
    assert answer.status_code == 400, answer.text
    assert re.search(message, answer.json()["error"]["message"]), answer.text


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0},
        {"top_p": 0},
        {"top_p": 1.5},
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
        {"max_new_tokens": "3"},
        {"timeout": 0},
        {"timeout": 3601},
        {"seed": -1},
        {"seed": 1.5},
    ],
)
def test_invalid_parameters_are_refused_by_name(http: Any, parameters: dict[str, Any]) -> None:
    answer = infer(http, "x", **parameters)
    assert answer.status_code == 400
    assert next(iter(parameters)) in answer.json()["error"]["message"]
