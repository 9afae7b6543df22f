"""Tests for the requests and responses in docs/api.md."""

import base64
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindie_mm.settings.sources import CLASSES
from service.http.errors import KINDS, TABLE, error_body

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api.md").read_text()
ANSWERS: dict[str, Callable[[Any], object]] = {
    "/v1/chat/completions": lambda answer: answer["choices"][0]["message"]["content"],
    "/v1/completions": lambda answer: answer["choices"][0]["text"],
    "/v1/messages": lambda answer: answer["content"][0]["text"],
    "/infer": lambda answer: answer["generated_text"] and answer["details"],
    "/tokenize": lambda answer: answer["tokens"] and answer["token_strs"],
    "/rerank": lambda answer: answer["results"],
    "/score": lambda answer: answer["data"],
    "/detokenize": lambda answer: answer["prompt"],
}
"""Functions that return the part of a response that must not be empty, by path."""
CALLS = re.findall(r"^curl localhost:8000(\S+) .*? -d '(.*?)'$", PAGE, re.MULTILINE | re.DOTALL)
IMAGE = 784
"""Token id of the image placeholder in the embedded checkpoint."""


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def documented(start: str) -> dict[str, Any]:
    """Return the JSON example that begins with `start`."""
    text = PAGE[PAGE.index("\n" + start) :]
    example: dict[str, Any] = json.JSONDecoder().raw_decode(text.strip().removeprefix("data: "))[0]
    return example


@pytest.mark.parametrize(("path", "body"), CALLS, ids=range(len(CALLS)))
def test_each_curl_request_is_answered(http: Any, red_square: str, path: str, body: str) -> None:
    request = json.loads(body.replace("data:image/png;base64,iVBORw0...", red_square))
    if path.startswith("/v1/"):
        request["max_tokens"] = 32
    answer = http.post(path, json=request)
    assert answer.status_code == 200, answer.text
    assert ANSWERS[path](answer.json())


def test_every_endpoint_has_a_curl_request() -> None:
    assert {path for path, _ in CALLS} == set(ANSWERS)
    assert len(CALLS) == 10


@pytest.mark.parametrize(
    ("path", "start", "parameters"),
    [
        ("/infer", '{"generated_text": "a cat",\n "details": {"finish', {"details": True}),
        (
            "/generate",
            '{"generated_text": "a cat",\n "details": {\n   "prompt',
            {"details": True, "decoder_input_details": True},
        ),
    ],
)
def test_answers_have_the_documented_fields(http: Any, path: str, start: str, parameters: dict[str, Any]) -> None:
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
def test_stream_events_have_the_documented_fields(http: Any, path: str, starts: tuple[str, str]) -> None:
    answer = http.post(path, json={"inputs": "What colour", "stream": True, "parameters": {"max_new_tokens": 4}})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    for event, start in zip((events[0], events[-1]), starts, strict=True):
        shown = documented(start)
        assert list(event) == list(shown)
        assert list(event["token"]) == list(shown["token"])


def test_usage_and_timings_have_the_documented_fields(http: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, "timings": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert list(answer["usage"]["prompt_tokens_details"]) == list(documented('{"cached_tokens"'))
    timings = json.JSONDecoder().raw_decode(PAGE[PAGE.index('"timings": {"fetch_s"') + len('"timings": ') :])[0]
    assert list(answer["timings"]) == list(timings)


def test_the_image_in_the_text_example_becomes_an_item(http: Any, media_dir: Path) -> None:
    raw = base64.b64encode((media_dir / "green_star.jpg").read_bytes()).decode()
    asked = {"prompt": documented('{"prompt":\n "### Human')["prompt"].replace("/9j/4AAQ...", raw)}
    ids = http.post("/tokenize", json=asked).json()["tokens"]
    assert IMAGE in ids, "an item, not text"
    assert http.post("/v1/completions", json=asked).json()["usage"]["prompt_tokens"] == len(ids)


def test_the_tokenize_example_is_reversible(http: Any) -> None:
    ids = http.post("/tokenize", json={"prompt": "What colour"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "What colour"}


def test_the_examples_of_embeddings_are_answered(http: Any, red_square: str) -> None:
    block = section("POST /v1/embeddings").partition("```json\n")[2].partition("\n```")[0]
    bodies = re.split(r"\n(?=\{)", block.replace("data:image/png;base64,...", red_square))
    assert len(bodies) == 3
    for body in bodies:
        answer = http.post("/v1/embeddings", json=json.loads(body))
        assert answer.status_code == 200, answer.text
        assert answer.json()["data"]


@pytest.mark.parametrize("title", ["/v1/responses", "/v1/files", "/v1/batches"])
def test_the_examples_of_clients_run(
    http: Any, title: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    source = section(title).partition("```python\n")[2].partition("```")[0]
    names = run(source.replace("http://127.0.0.1:8000", str(http.base_url).rstrip("/")), {})
    names["client"].close()
    printed = capsys.readouterr().out.splitlines()
    if title == "/v1/responses":
        assert len(printed) == 1
        assert printed[0]
    elif title == "/v1/files":
        assert "A red circle." in printed[0]
        assert "note.txt" in printed[-2]
        assert printed[-1] == "True"
    else:
        assert printed[0].startswith("completed {")
        assert re.search("cancelling|cancelled|only a batch in progress can be", printed[-2])
        assert names["second"].id in printed[-1]


def run(source: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run an example with the variables in `given`, and return all variables that exist afterwards."""
    names = dict(given)
    exec(compile(source, "docs/api.md", "exec"), names)
    return names


def test_the_example_of_an_error_is_returned(http: Any, media_dir: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{media_dir}/none.png"}}
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
    assert answer.json() == documented('{"error"')


def test_the_table_lists_every_error_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (\w+) \|", section("Errors"), re.MULTILINE)
    types = {int(status): kind for status, kind in rows}
    assert len(types) == len(rows)
    assert set(types) >= {*TABLE.values(), *KINDS}
    assert types == {status: error_body("", status)["error"]["type"] for status in types}


def test_every_option_that_the_page_names_exists() -> None:
    settings = {field.name for cls in CLASSES for field in dataclasses.fields(cls)}
    named = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)", PAGE)} - {"no_web_page"}
    assert "max_request_bytes" in named
    assert named <= settings
