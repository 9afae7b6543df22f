"""What the service says of its shared memory, and of where a prompt's media lie."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.serving import RunningService

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()


def documented(start: str) -> Any:
    text = PAGE[PAGE.index(start) + len(start) :]
    return json.JSONDecoder().raw_decode(text.strip())[0]


def body(*sources: str, **changes: Any) -> dict[str, Any]:
    content = [*({"image": source} for source in sources), {"text": "What colour"}]
    return {"messages": [{"role": "user", "content": content}], "media_spans": True, "max_tokens": 4} | changes


def test_spans_are_where_the_placeholders_stand(http: Any, red_square: str) -> None:
    asked = body(red_square, red_square)
    answer = http.post("/v1/chat/completions", json=asked).json()
    ids = http.post("/tokenize", json={"messages": asked["messages"]}).json()["tokens"]
    first, second = answer["media_spans"]
    (shown,) = documented('    "media_spans": ')
    for span in (first, second):
        assert list(span) == list(shown)
        assert span["type"] == "image"
        pad = ids[span["start"]]
        assert ids[span["start"] : span["stop"]] == [pad] * span["features"]
        assert pad not in (ids[span["start"] - 1], ids[span["stop"]])
    assert first["stop"] < second["start"]
    assert first["block"] != second["block"]
    details = answer["usage"]["prompt_tokens_details"]
    assert first["features"] + second["features"] == details["image_tokens"]


def test_who_does_not_ask_is_not_told(http: Any, red_square: str) -> None:
    assert "media_spans" not in http.post("/v1/chat/completions", json=body(red_square, media_spans=False)).json()
    assert http.post("/v1/chat/completions", json=body()).json()["media_spans"] == []


@pytest.fixture
def streaming(http: Any, red_square: str) -> Iterator[dict[str, Any]]:
    """The first chunk of an answer with two choices that goes on for as long as the test does."""
    asked = body(red_square, stream=True, n=2, ignore_eos=True, max_tokens=3900)
    with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        lines = answer.iter_lines()
        chunks = [json.loads(line[6:]) for line, _ in zip(lines, range(12), strict=False) if line]
        assert ["media_spans" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        yield chunks[0]


def test_blocks_in_use(service: RunningService, streaming: dict[str, Any]) -> None:
    found = service.get("/shm?blocks=true")
    shown = documented("## GET /shm\n")
    assert list(found) == list(shown)
    (arena,) = found["arenas"]
    assert list(arena) == list(shown["arenas"][0])
    (block,) = arena["map"]
    assert list(block) == list(shown["arenas"][0]["map"][0])
    (span,) = streaming["media_spans"]
    assert block["name"] == span["block"]
    assert block["state"] == "published"
    assert block["age_s"] >= 0
    assert sum(size for _, size in block["pieces"]) == block["bytes"] == arena["bytes"] <= arena["peak_bytes"]
    assert block["arrays"]["pixel_values"]["dtype"] == "uint8"
    assert (service.log.parent / "spool" / block["request"]).is_dir()
    assert "map" not in service.shm()["arenas"][0]
