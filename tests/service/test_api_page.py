"""docs/api.md is true: its requests are answered, and its answers have the fields that ours have."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
ANSWERS: dict[str, Callable[[Any], object]] = {
    "/v1/chat/completions": lambda answer: answer["choices"][0]["message"]["content"],
    "/v1/completions": lambda answer: answer["choices"][0]["text"],
    "/infer": lambda answer: answer["generated_text"] and answer["details"],
    "/tokenize": lambda answer: answer["tokens"] and answer["token_strs"],
}
"""What is in the answer to a path's example."""
CALLS = re.findall(r"^    curl localhost:8000(\S+) .*? -d '(.*?)'$", PAGE, re.MULTILINE | re.DOTALL)


def documented(start: str) -> dict[str, Any]:
    """The example that begins with `start`, whose lines are indented by four."""
    text = PAGE[PAGE.index("    " + start) :]
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text.strip().removeprefix("data: "))[0]
    return found


@pytest.mark.parametrize(("path", "body"), CALLS, ids=range(len(CALLS)))
def test_requests(http: Any, red_square: str, path: str, body: str) -> None:
    asked = json.loads(body.replace("data:image/png;base64,iVBORw0...", red_square))
    if path.startswith("/v1/"):
        asked["max_tokens"] = 32
    answer = http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert ANSWERS[path](answer.json())


def test_there_are_requests() -> None:
    assert {path for path, _ in CALLS} == set(ANSWERS)
    assert len(CALLS) == 5


@pytest.mark.parametrize(
    ("path", "start", "parameters"),
    [
        ("/infer", '{"generated_text": "a cat",\n     "details": {"finish', {"details": True}),
        (
            "/generate",
            '{"generated_text": "a cat",\n     "details": {"prompt',
            {"details": True, "decoder_input_details": True},
        ),
    ],
)
def test_answers(http: Any, path: str, start: str, parameters: dict[str, Any]) -> None:
    shown = documented(start)
    answer = http.post(path, json={"inputs": "What colour", "parameters": parameters}).json()
    assert set(answer) == set(shown)
    assert set(answer["details"]) == set(shown["details"])
    for name in {"prefill", "tokens"} & set(shown["details"]):
        assert set(answer["details"][name][0]) == set(shown["details"][name][0])


@pytest.mark.parametrize(
    ("path", "starts"),
    [
        ("/infer", ('data: {"prefill_time":45', 'data: {"prefill_time":null')),
        ("/generate_stream", ('data: {"token":{"id":[64]', 'data: {"token":{"id":[2]')),
    ],
)
def test_streams(http: Any, path: str, starts: tuple[str, str]) -> None:
    answer = http.post(path, json={"inputs": "What colour", "stream": True, "parameters": {"max_new_tokens": 4}})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    for event, start in zip((events[0], events[-1]), starts, strict=True):
        shown = documented(start)
        assert list(event) == list(shown)
        assert list(event["token"]) == list(shown["token"])


def test_usage_and_timings(http: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, "timings": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert list(answer["usage"]["prompt_tokens_details"]) == list(documented('{"cached_tokens"'))
    timings = json.JSONDecoder().raw_decode(PAGE[PAGE.index('"timings": {"fetch_s"') + len('"timings": ') :])[0]
    assert list(answer["timings"]) == list(timings)
