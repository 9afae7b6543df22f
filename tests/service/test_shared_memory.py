"""Tests for GET /shm and the field `media_spans`."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.watching import stopped_engine, wait_until
from tools.serving import RunningService

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()


def documented(start: str) -> Any:
    text = PAGE[PAGE.index(start) + len(start) :]
    return json.JSONDecoder().raw_decode(text.strip())[0]


def body(*sources: str, **changes: Any) -> dict[str, Any]:
    content = [*({"image": source} for source in sources), {"text": "What colour"}]
    return {"messages": [{"role": "user", "content": content}], "media_spans": True, "max_tokens": 4} | changes


def test_media_spans_cover_the_placeholder_tokens(http: Any, red_square: str) -> None:
    chat = body(red_square, red_square)
    answer = http.post("/v1/chat/completions", json=chat).json()
    ids = http.post("/tokenize", json={"messages": chat["messages"]}).json()["tokens"]
    first, second = answer["media_spans"]
    (shown,) = documented('\n"media_spans": ')
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


def test_media_spans_are_absent_unless_requested(http: Any, red_square: str) -> None:
    assert "media_spans" not in http.post("/v1/chat/completions", json=body(red_square, media_spans=False)).json()
    assert http.post("/v1/chat/completions", json=body()).json()["media_spans"] == []


def test_the_first_chunk_of_a_stream_carries_the_media_spans(http: Any, red_square: str) -> None:
    with http.stream("POST", "/v1/chat/completions", json=body(red_square, stream=True, n=2)) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert ["media_spans" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def test_the_shm_endpoint_describes_each_block_as_documented(
    service: RunningService, http: Any, red_square: str
) -> None:
    with ThreadPoolExecutor() as threads:
        with stopped_engine(service):
            answer = threads.submit(http.post, "/v1/chat/completions", json=body(red_square))
            wait_until(lambda: service.shm()["blocks"])
            wait_until(lambda: service.get("/shm?blocks=true")["arenas"][0]["map"][0]["state"] == "published")
            shm = service.get("/shm?blocks=true")
            (path_file,) = (service.log.parent / "spool").glob("*/shm_name.txt")
        (span,) = answer.result().json()["media_spans"]
    shown = documented("## GET /shm\n\n```json\n")
    assert list(shm) == list(shown)
    (arena,) = shm["arenas"]
    assert list(arena) == list(shown["arenas"][0])
    (block,) = arena["map"]
    assert list(block) == list(shown["arenas"][0]["map"][0])
    assert block["name"] == span["block"]
    assert block["state"] == "published"
    assert block["age_s"] >= 0
    assert sum(size for _, size in block["pieces"]) == block["bytes"] == arena["bytes"] <= arena["peak_bytes"]
    assert block["arrays"]["pixel_values"]["dtype"] == "uint8"
    assert path_file.parent.name == block["request"]
    assert "map" not in service.shm()["arenas"][0]
