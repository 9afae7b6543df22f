"""Tests for /render, in a service with an engine and in `mindie-mm render`."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image

from mindie_mm.models import family_of
from mindie_mm.nn.checkpoint.config_only import ConfigOnly
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.tokenize.prompts import sizes_of
from mindie_mm.worker.no_engine import NoEngine
from tests.service.conftest import TINY, MiB
from tests.warm import running_service
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

PUBLISHED = Path(__file__).parents[1] / "published"
SETTINGS = {
    "max_model_len": 2048,
    "max_request_bytes": 8 * MiB,
    "model_id": "tiny",
    "decoders": 1,
    "generation_config": "vllm",
}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Yield a running `mindie-mm render`."""
    folder = tmp_path_factory.mktemp("render")
    given = SETTINGS | {"spool": folder / "spool"}
    files = folder / "files"
    environment = {"MINDIE_MM_FILES_PATH": str(files)}
    with running_service(given, folder / "log", command="render", environment=environment) as running:
        yield running
        assert running.shm()["blocks"] == 0
        assert running.stop() == 0, running.log.read_text()[-2000:]
    assert not [*(folder / "spool").iterdir()], "request directories are left"
    assert not files.exists(), "the folder of batches belongs to services with engines"
    assert "MINDIE_MM_FILES_PATH has no effect on mindie-mm render" in (folder / "log").read_text()


@pytest.fixture(scope="module")
def render(renderer: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=renderer.url, timeout=120) as client:
        yield client


def chat(*urls: str, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}], **fields}


def none(client: httpx2.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions/render", json={"mm_payload": "none", **body})
    assert answer.status_code == 200, answer.text
    rendered: dict[str, Any] = answer.json()
    return rendered


def test_a_chat_has_the_ids_of_tokenize_and_a_range_per_image(render: httpx2.Client, red_square: str) -> None:
    rendered = none(render, chat(red_square, red_square, max_tokens=16, temperature=0, stop=["."], seed=3))
    tokenized = render.post("/tokenize", json=chat(red_square, red_square)).json()
    assert rendered["token_ids"] == tokenized["tokens"]
    features = rendered["features"]
    first, second = features["mm_placeholders"]["image"]
    for place in (first, second):
        own = rendered["token_ids"][place["offset"] : place["offset"] + place["length"]]
        assert len({*own}) == 1, "only placeholders"
    assert first["offset"] + first["length"] <= second["offset"]
    assert (features["kwargs_data"], features["mm_metadata"]) == (None, None)
    hashes = features["mm_hashes"]["image"]
    assert (len(hashes), hashes[0], len(hashes[0])) == (2, hashes[1], 64)
    assert rendered["sampling_params"] == {"temperature": 0.0, "seed": 3, "stop": ["."], "max_tokens": 16}
    assert rendered["request_id"].startswith("chatcmpl-")


def test_planned_files_share_a_folder_and_are_removed(renderer: RunningService, render: httpx2.Client) -> None:
    spool = renderer.log.parent / "spool"
    for red in (11, 12):
        none(render, chat(data_url(draw_shape("red", (red, 60, 200), "circle", x=0.2))))
        (path_file,) = spool.glob("*/*")
    path_file.unlink()  # as programs do that clean up temporary files
    none(render, chat(data_url(draw_shape("red", (13, 60, 200), "circle", x=0.2))))
    assert len([*spool.glob("*/*")]) == 1


def test_media_that_come_again_are_not_planned_again(render: httpx2.Client) -> None:
    urls = [data_url(draw_shape("blue", (40, 60, 200), "circle", x=at)) for at in (0.3, 0.6)]

    def counts() -> tuple[int, int]:
        found = re.findall(r"mindie_mm:plan_cache_(?:queries|hits)_total\{.*\} (\S+)", render.get("/metrics").text)
        return int(float(found[0])), int(float(found[1]))

    asked, hits = counts()
    one, other = none(render, chat(urls[0])), none(render, chat(*urls))
    again = none(render, chat(*urls))
    assert counts() == (asked + 5, hits + 3)
    assert (again["token_ids"], again["features"]) == (other["token_ids"], other["features"])
    assert other["features"]["mm_hashes"]["image"][0] == one["features"]["mm_hashes"]["image"][0]
    named = none(render, chat(*urls, mm_processor_kwargs={"max_pixels": 28 * 28 * 4}))
    assert counts() == (asked + 7, hits + 3)
    assert named["features"]["mm_hashes"] != other["features"]["mm_hashes"]


def test_media_that_come_again_count_toward_the_limit_of_a_request(render: httpx2.Client) -> None:
    image = f'<img src="{data_url(draw_shape("blue", (40, 60, 200), "circle", x=0.4))}">'

    def post(*prompts: str) -> httpx2.Response:
        return render.post("/v1/completions/render", json={"prompt": [*prompts], "mm_payload": "none"})

    assert post(image).status_code == 200
    for prompts in ([image * 11] * 3, [image * 4] * 9):
        assert "media items; the limit is 32" in post(*prompts).text


def test_a_text_has_no_features_and_the_room_of_the_context(render: httpx2.Client) -> None:
    rendered = none(render, {"messages": [{"role": "user", "content": "Hello!"}]})
    assert rendered["features"] is None
    assert rendered["sampling_params"]["max_tokens"] == 2048 - len(rendered["token_ids"])


def test_completions_are_a_list(render: httpx2.Client) -> None:
    def rendered(prompt: Any) -> list[dict[str, Any]]:
        answer = render.post("/v1/completions/render", json={"prompt": prompt})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()
        return found

    one, two = rendered(["Hello!", "What is it?"])
    assert rendered("Hello!")[0]["token_ids"] == one["token_ids"]
    assert rendered([one["token_ids"], two["token_ids"]])[1]["token_ids"] == two["token_ids"]
    assert (one["request_id"][-2:], two["request_id"][-2:]) == ("-0", "-1")
    assert one["sampling_params"] == {"max_tokens": 16}


def test_requests_that_cannot_be_rendered_are_refused(render: httpx2.Client, red_square: str) -> None:
    broken = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    for body, status, message in (
        (
            chat(red_square),
            400,
            "mm_payload=tensors is not supported for media of the kind image of Qwen25Omni",
        ),
        (chat("http://127.0.0.1/a.png"), 400, "mm_payload=tensors"),  # before it is fetched
        (chat(red_square, mm_payload="all"), 400, "mm_payload"),
        (chat(broken, mm_payload="none"), 400, "media item 0 (image)"),
        (chat("http://127.0.0.1/a.png", mm_payload="none"), 400, "not public"),
        (chat("file:///etc/passwd", mm_payload="none"), 400, "--allowed-media-dir"),
        (chat(mm_payload="none", model="other"), 404, "other"),
        (chat(mm_payload="none", max_tokens=2048), 400, "maximum context length is 2048"),
        (chat(mm_payload="none", use_beam_search=True, n=2), 400, "use_beam_search"),
    ):
        answer = render.post("/v1/chat/completions/render", json=body)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text


def test_a_file_that_is_broken_behind_its_header_is_rendered(render: httpx2.Client) -> None:
    file = io.BytesIO()
    Image.effect_noise((120, 80), 50).convert("RGB").save(file, "PNG")
    whole = file.getvalue()
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in (whole, broken)]
    one, other = (none(render, chat(url)) for url in urls)
    assert one["token_ids"] == other["token_ids"]
    assert one["features"]["mm_hashes"] != other["features"]["mm_hashes"]


def test_token_ids_are_limited_like_texts(render: httpx2.Client) -> None:
    def post(prompt: Any, **fields: Any) -> httpx2.Response:
        return render.post("/v1/completions/render", json={"prompt": prompt, **fields})

    (cut,) = post([1, 2, 3, 4], truncate_prompt_tokens=2).json()
    assert cut["token_ids"] == [3, 4]
    (fitted,) = post([5] * 3000, truncate_prompt_tokens=-1, max_tokens=48).json()
    assert (len(fitted["token_ids"]), fitted["sampling_params"]["max_tokens"]) == (2000, 48)
    for prompt, fields, message in (
        ([5] * 3000, {}, "maximum context length is 2048"),
        ([5] * 2047, {"max_tokens": 2}, "maximum context length is 2048"),
        ([5], {"structured_outputs": {"regex": "("}}, "not supported"),
    ):
        answer = post(prompt, **fields)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


def test_hashes_are_those_of_the_images_that_truncation_leaves(render: httpx2.Client, red_square: str) -> None:
    blue = data_url(draw_shape("blue", (40, 60, 220), "circle", x=0.5))
    whole = none(render, chat(red_square, blue))
    last = whole["features"]["mm_placeholders"]["image"][1]
    num_kept = len(whole["token_ids"]) - last["offset"] + 1
    for side, kept, number in (("left", 1, num_kept), ("right", 0, last["offset"] - 1)):
        cut = none(render, chat(red_square, blue, truncate_prompt_tokens=number, truncation_side=side))
        assert cut["features"]["mm_hashes"]["image"] == [whole["features"]["mm_hashes"]["image"][kept]], side


def test_a_uuid_without_data_has_the_hash_of_its_first_request(render: httpx2.Client, red_square: str) -> None:
    body = chat(red_square)
    part = body["messages"][0]["content"][0]
    part["uuid"] = "red"
    first = none(render, body)
    part["image_url"] = None
    assert none(render, body)["features"] == first["features"]
    assert first["features"]["mm_hashes"]["image"] == ["red"]


def test_a_uuid_names_the_data_that_came_last(render: httpx2.Client, red_square: str) -> None:
    """Its data may be kept, and be planned already, as those of another request before."""
    other = data_url(draw_shape("green", (40, 160, 60), "star", x=0.5).resize((112, 112)))

    def rendered(url: str | None) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": url}, "uuid": "again"}
        return none(render, {"messages": [{"role": "user", "content": [part]}]})["features"]

    for url in (red_square, other, red_square, other):
        assert rendered(url) == rendered(None)
    assert rendered(red_square) != rendered(other)


def test_bad_words_are_sent_as_words(render: httpx2.Client) -> None:
    sent = none(render, chat(bad_words=["red"], max_tokens=1))["sampling_params"]
    assert sent == {"bad_words": ["red"], "max_tokens": 1}


def engine_of(model: Path, **settings: Any) -> NoEngine:
    """Return the place of an engine, with the sizes that a tokenizer process would send."""
    checkpoint = ConfigOnly.open(model)
    family = family_of(checkpoint, None)
    sizes = sizes_of(family.translated(checkpoint), family)
    return NoEngine.of(WorkerConfig(model=model, **settings), sizes)


def test_the_context_is_that_of_the_engine(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    shutil.copytree(TINY, tmp_path / "tiny")
    config = json.loads((TINY / "config.json").read_text())
    for changes, own, expected in (({}, 0, 4096), (yarn, 0, 4096), (yarn | {"factor": 8.0}, 0, 8192), ({}, 100, 100)):
        text = config["text_config"]
        changed = config | {"text_config": text | {"rope_scaling": text["rope_scaling"] | changes}}
        (tmp_path / "tiny/config.json").write_text(json.dumps(changed))
        engine = engine_of(tmp_path / "tiny", engine=EngineConfig(max_model_len=own or None))
        assert (engine.info.max_model_len, engine.info.max_output_len) == (expected, None), changes


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gemma3_medgemma27b", (131072, None)), ("whisper_base", (1948, 447)), ("florence2_oracle", (1024, 1024))],
)
def test_the_context_of_published_checkpoints_is_known(name: str, sizes: tuple[int, int | None]) -> None:
    engine = engine_of(PUBLISHED / name, generation_config="vllm")
    assert (engine.info.max_model_len, engine.info.max_output_len) == sizes


def test_only_routes_without_a_model_are_served(render: httpx2.Client, renderer: RunningService) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/version", "/openapi.json"):
        assert render.get(path).status_code == 200, path
    for path in ("/v1/chat/completions", "/v1/completions", "/infer", "/inference/v1/generate"):
        assert render.post(path, json={}).status_code == 404, path
    assert renderer.announcement.startswith("mindie_mm renders prompts of ")


def test_a_service_refuses_to_render_unless_it_is_enabled(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "prompt": "Hello!"}
    body |= {"token_ids": [1], "sampling_params": {}}
    for path in ("/v1/chat/completions/render", "/v1/completions/render", "/inference/v1/generate"):
        answer = http.post(path, json=body)
        assert (answer.status_code, "--enable-scale-out" in answer.json()["error"]["message"]) == (403, True)


@pytest.mark.slow
def test_a_service_renders_what_it_answers(tmp_path: Path, red_square: str) -> None:
    given = {"enable_scale_out": True, "arena_bytes": 4 * MiB, "spool": tmp_path / "spool", "kv_cache_bytes": 8 * MiB}
    with (
        running_service(given, tmp_path / "log") as running,
        httpx2.Client(base_url=running.url, timeout=120) as client,
    ):
        rendered = none(client, chat(red_square))
        answer = client.post("/v1/chat/completions", json=chat(red_square, max_tokens=1, return_token_ids=True)).json()
        assert rendered["token_ids"] == answer["prompt_token_ids"]
