"""Tests for payloads with tensors: /render with mm_payload tensors, and /inference/v1/generate."""

from __future__ import annotations

import base64
import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from tests.service.conftest import MiB
from tests.vllm.checkpoints import write
from tests.vllm.payloads import FAMILY, GENERATE, RENDER, answerable, scores, stored, tensors
from tests.vllm.payloads import OTHERS as WITH_ANSWERS
from tests.vllm.tensors import FAMILIES, TILES, chats_of
from tests.warm import running_service
from tools.demo import data_url, draw_shape
from tools.random_checkpoint import write_checkpoint
from tools.serving import RunningService

STORED = stored()
Payload = dict[str, Any]
CLOSE = 1e-4
MAX_PIXELS = 400 * 28 * 28
SETTINGS = {
    "enable_scale_out": True,
    "like": "vllm",
    "model_id": FAMILY,
    "served_model_name": FAMILY,
    "generation_config": "vllm",
    "arena_bytes": 16 * MiB,
    "kv_cache_bytes": 8 * MiB,
    "max_model_len": 2048,
    "max_request_bytes": 16 * MiB,
    "max_item_bytes": 8 * MiB,
    "max_held_bytes": 20 * MiB,
    "dtype": "float32",
    "decoders": 1,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Yield a service with the checkpoint for which vLLM's payloads are stored."""
    folder = tmp_path_factory.mktemp("inference")
    checkpoint = write_checkpoint(folder / FAMILY, "wide")
    preprocessor = checkpoint / "preprocessor_config.json"
    limits = {"max_pixels": MAX_PIXELS, "size": {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}}
    preprocessor.write_text(json.dumps(json.loads(preprocessor.read_text()) | limits))
    with running_service(SETTINGS | {"spool": folder / "spool"}, folder / "log", checkpoint) as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, running.log.read_text()[-2000:]
    assert not [*(folder / "spool").iterdir()], "request directories are left"


@pytest.fixture(scope="module")
def client(served: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=120) as client:
        yield client


def post(client: httpx2.Client, path: str, body: Payload) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx2.Client, body: Payload) -> list[Payload]:
    with client.stream("POST", GENERATE, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", STORED)
def test_the_payload_and_the_answer_equal_vllms(client: httpx2.Client, name: str) -> None:
    assert_equals_vllms(client, FAMILY, name)
    chat, tokens = STORED[name]["chat"], scores(STORED[name]["answer"]["choices"][0])[0]
    whole = post(client, "/v1/chat/completions", {**chat, "return_token_ids": True})["choices"][0]
    assert whole["token_ids"] == tokens


def assert_equals_vllms(client: httpx2.Client, family: str, name: str) -> None:
    chat, theirs, answer = (stored(family)[name][key] for key in ("chat", "render", "answer"))
    ours = post(client, RENDER, chat)
    for part in ("kwargs_data", "mm_metadata"):
        assert tensors(ours, part) == tensors(theirs, part), part
    for part in ("mm_hashes", "mm_placeholders"):
        assert ours["features"][part] == answerable(theirs)["features"][part], part
    tokens, logprobs = scores(answer["choices"][0])
    for payload in (ours, theirs):
        generated = post(client, GENERATE, payload)
        found, own = scores(generated["choices"][0])
        assert found == tokens
        assert own == pytest.approx(logprobs, abs=CLOSE)
        assert {*answer} - {*generated} <= {"prompt_token_id_logprobs"}
        assert {*answer["choices"][0]} == {*generated["choices"][0]}
        position, theirs_first = (
            one["logprobs"]["content"][0] for one in (generated["choices"][0], answer["choices"][0])
        )
        assert [one["token_id"] for one in position["top_logprobs"]] == [
            one["token_id"] for one in theirs_first["top_logprobs"]
        ]
        assert position["rank"] == theirs_first["rank"]


def test_a_stream_has_the_tokens_of_the_whole_answer(client: httpx2.Client) -> None:
    chat = STORED["two"]["chat"]
    payload = post(client, RENDER, chat) | {"output_mode": "text", "return_token_ids": True}
    whole = post(client, GENERATE, payload)
    parts = events(client, payload | {"stream_options": {"include_usage": True}})
    *chunks, last = parts
    assert (last["choices"], last["usage"]) == (
        [],
        whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]},
    )
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == payload["token_ids"]
    assert chunks[0]["mm_placeholders"] == whole["mm_placeholders"] == payload["features"]["mm_placeholders"]
    assert "prompt_token_ids" not in chunks[1]
    (choice,) = whole["choices"]
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert [token for one in streamed for token in one["token_ids"]] == choice["token_ids"]
    assert "".join(one["text"] for one in streamed) == choice["text"]
    assert choice["text"] == post(client, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    assert (streamed[-1]["finish_reason"], choice["finish_reason"]) == ("length", "length")


def test_choices_and_settings_are_those_of_the_chat(client: httpx2.Client) -> None:
    chat = STORED["one"]["chat"] | {"n": 2, "temperature": 1.0, "seed": 5, "logit_bias": {"70": -50}}
    payload = post(client, RENDER, chat)
    assert (payload["sampling_params"]["n"], payload["sampling_params"]["logit_bias"]) == (2, {"70": -50.0})
    answers = post(client, GENERATE, payload), post(client, "/v1/chat/completions", chat | {"return_token_ids": True})
    first, second = ([choice["token_ids"] for choice in answer["choices"]] for answer in answers)
    assert first == second


def test_a_text_is_continued_up_to_the_context(client: httpx2.Client) -> None:
    body = {"token_ids": [70] * 2000, "sampling_params": {"temperature": 0, "ignore_eos": True, "prompt_logprobs": 1}}
    answer = post(client, GENERATE, body)
    assert answer["usage"]["completion_tokens"] == 48, "max_tokens is left out"
    assert (answer["prompt_logprobs"][0], len(answer["prompt_logprobs"])) == (None, 2000)
    completion = {"model": FAMILY, "prompt": [70] * 2000, "temperature": 0, "ignore_eos": True, "max_tokens": 48}
    expected = post(client, "/v1/completions", completion | {"return_token_ids": True})["choices"][0]["token_ids"]
    assert answer["choices"][0]["token_ids"] == expected


def chats(family: str) -> Iterator[Payload]:
    """Yield chats with one image, two images and, if the family sends its tensors, a video."""
    settings = STORED["one"]["chat"] | {"model": family}
    yield from (one["chat"] | {"model": family} for one in STORED.values())
    yield from (settings | {"messages": body["messages"]} for name, body in chats_of(family).items() if name == "video")


def assert_answered_like(client: httpx2.Client, chat: Payload) -> None:
    """Check that the payload of a chat has the same answer as the chat, also as a stream."""
    payload = post(client, RENDER, chat)
    (choice,) = post(client, GENERATE, payload)["choices"]
    tokens, logprobs = scores(choice)
    (own,) = post(client, "/v1/chat/completions", chat | {"return_token_ids": True})["choices"]
    assert own["token_ids"] == tokens
    assert [one["logprob"] for one in own["logprobs"]["content"]] == pytest.approx(logprobs, abs=CLOSE)
    assert [token for event in events(client, payload) for token in event["choices"][0]["token_ids"]] == tokens


def test_payloads_are_answered_like_chats(client: httpx2.Client) -> None:
    for chat in chats(FAMILY):
        assert_answered_like(client, chat)


OTHERS = [
    pytest.param(family, marks=[] if family == "internvl" else pytest.mark.slow)
    for family in FAMILIES
    if family != FAMILY
]


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_answer_payloads_like_chats(family: str, tmp_path: Path) -> None:
    """In this service, the prompts of /render follow transformers as those of chats do."""
    given = SETTINGS | {"model_id": family, "served_model_name": family, "max_model_len": 512, "like": "transformers"}
    checkpoint = write(family, tmp_path / family)
    with (
        running_service(given | {"spool": tmp_path / "spool"}, tmp_path / "log", checkpoint) as running,
        httpx2.Client(base_url=running.url, timeout=120) as client,
    ):
        for chat in chats(family):
            assert_answered_like(client, chat)
        if family in TILES:
            payload = post(client, RENDER, STORED["one"]["chat"] | {"model": family})
            (item,) = payload["features"]["kwargs_data"]["image"]
            payload["features"]["kwargs_data"]["image"] = [_not_a_number(item)]
            answer = client.post(GENERATE, json=payload)
            assert (answer.status_code, "no byte has after normalization" in answer.text) == (400, True), answer.text
        assert running.wait_until_free()["blocks"] == 0


def _not_a_number(item: str) -> str:
    """Return an item whose last pixel is not a number."""
    tensors = msgspec.msgpack.decode(base64.b64decode(item))
    data = tensors["pixel_values"]["data"]
    data[2] = Ext(3, data[2].data[:-4] + b"\xff" * 4)
    return base64.b64encode(msgspec.msgpack.encode(tensors)).decode()


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_ANSWERS)
def test_other_families_give_vllms_answers_to_both_payloads(family: str, tmp_path: Path) -> None:
    given = SETTINGS | {"model_id": family, "served_model_name": family, "spool": tmp_path / "spool"}
    checkpoint = write(family, tmp_path / family, is_run=True)
    with (
        running_service(given, tmp_path / "log", checkpoint) as running,
        httpx2.Client(base_url=running.url, timeout=120) as client,
    ):
        for name in stored(family):
            assert_equals_vllms(client, family, name)


def test_media_that_cannot_be_rendered_leave_nothing(client: httpx2.Client, served: RunningService) -> None:
    chat = copy.deepcopy(STORED["two"]["chat"])
    image = chat["messages"][0]["content"][1]["image_url"]
    image["url"] = image["url"][: len(image["url"]) // 2 // 4 * 4]
    answer = client.post(RENDER, json=chat)
    assert (answer.status_code, "media item 1 (image)" in answer.json()["error"]["message"]) == (400, True), answer.text
    assert (served.shm()["blocks"], [*(served.log.parent / "spool").glob("[!p]*")]) == (0, [])


def test_answers_with_tensors_have_a_limit_together(client: httpx2.Client, served: RunningService) -> None:
    """A client that does not read its answer must not let the service hold many of them."""
    body = copy.deepcopy(STORED["one"]["chat"])
    image = draw_shape("red", (220, 40, 40), "square", x=0.4).resize((560, 560))
    body["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": data_url(image)}}] * 5
    payload = post(client, RENDER, body)
    num_bytes = len(json.dumps(payload))
    assert SETTINGS["max_held_bytes"] / 2 < num_bytes < SETTINGS["max_held_bytes"], "one fits, and two do not"
    with httpx2.Client(base_url=served.url, timeout=120) as slow, slow.stream("POST", RENDER, json=body) as unread:
        assert unread.status_code == 200
        refused = client.post(RENDER, json=body)
        assert (refused.status_code, "(--max-held-bytes)" in refused.text) == (429, True), refused.text
        assert refused.headers["retry-after"]
        assert none(client, body)["token_ids"] == payload["token_ids"]
    deadline = time.monotonic() + 60
    while client.get("/load").json()["server_load"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert post(client, RENDER, body)["features"] == payload["features"]


def none(client: httpx2.Client, body: Payload) -> Any:
    return post(client, RENDER, body | {"mm_payload": "none"})


def test_a_client_that_leaves_frees_the_media(client: httpx2.Client, served: RunningService) -> None:
    payload = copy.deepcopy(STORED["two"]["render"]) | {"stream": True}
    payload["sampling_params"] |= {"max_tokens": 1900, "ignore_eos": True}
    with client.stream("POST", GENERATE, json=payload) as answer:
        next(answer.iter_lines())
    assert served.wait_until_free()["blocks"] == 0


def encoded(**changed: Any) -> str:
    """Return the stored item in base64, with other elements."""
    (item,) = tensors(STORED["one"]["render"])
    item |= changed
    return base64.b64encode(msgspec.msgpack.encode({k: v for k, v in item.items() if v is not None})).decode()


def element(dtype: str, shape: list[int], data: bytes, code: int = 3) -> Payload:
    return {"data": [dtype, shape, Ext(code, data)], "field": ["batched", {"keep_on_cpu": True}]}


def grid(*numbers: int) -> str:
    return encoded(image_grid_thw=element("int64", [len(numbers)], np.array(numbers, np.int64).tobytes()))


def pixels(dtype: str, shape: list[int], data: bytes, code: int = 3) -> str:
    return encoded(pixel_values=element(dtype, shape, data, code))


def large() -> str:
    """Return an image with more features than the checkpoint's largest one."""
    sides = element("int64", [3], np.array([1, 76, 76], np.int64).tobytes())
    shape = [76 * 76, 1176]
    return encoded(pixel_values=element("uint8", shape, bytes(76 * 76 * 1176)), image_grid_thw=sides)


def two_frames() -> str:
    rows = np.zeros((16, 3, 2, 196), np.uint8)
    rows[3, 1, 1, 7] = 1
    return pixels("uint8", [16, 1176], rows.tobytes())


RAW = bytes(16 * 1176)
ITEMS: dict[str, tuple[str | None, str]] = {
    "null": (None, "mm_payload tensors"),
    "no base64": ("?" * 40, "base64"),
    "no MessagePack": (base64.b64encode(b"\xc1" * 40).decode(), "MessagePack"),
    "no map": (base64.b64encode(b"\x90").decode(), "MessagePack"),
    "nested deeply": (base64.b64encode(b"\x81\xa1a" + b"\x91" * 100_000).decode(), "MessagePack"),
    "empty": (base64.b64encode(b"\x80").decode(), "no tensor"),
    "no pixels": (encoded(pixel_values=None), "no tensor pixel_values"),
    "no grid": (encoded(image_grid_thw=None), "no tensor image_grid_thw"),
    "a list of tensors": (encoded(pixel_values={"data": [["uint8", [1], Ext(3, b"1")]], "field": []}), "MessagePack"),
    "floats": (pixels("bfloat16", [16, 1176], RAW * 2), "--mm-device-do-normalize"),
    "an unknown dtype": (pixels("evil", [16, 1176], RAW), "'evil'"),
    "a negative side": (pixels("uint8", [-16, -1176], RAW), "MessagePack"),
    "sides without bytes": (pixels("uint8", [2**40, 1176], RAW), "bytes"),
    "sides beyond 64 bits": (pixels("uint8", [2**40] * 8, RAW), "bytes"),
    "many axes": (pixels("uint8", [1] * 70 + [16, 1176], RAW), "MessagePack"),
    "too few bytes": (pixels("uint8", [16, 1176], RAW[:-1]), "bytes"),
    "too many bytes": (pixels("uint8", [16, 1176], RAW + b"0"), "bytes"),
    "another extension type": (pixels("uint8", [16, 1176], RAW, 4), "type 4"),
    "a pickle": (pixels("uint8", [16, 1176], RAW, 1), "type 1"),
    "other rows": (pixels("uint8", [8, 2352], RAW), "(16, 1176)"),
    "frames that differ": (two_frames(), "must be equal"),
    "a larger grid": (grid(1, 4, 8), "(32, 1176)"),
    "a grid of zeros": (grid(0, 4, 4), "below 1"),
    "a negative grid": (grid(1, -4, -4), "below 1"),
    "a huge grid": (grid(2**62, 2**62, 4), "needs the shape"),
    "a grid of two numbers": (grid(4, 4), "must have 3 positive numbers"),
    "a grid that does not merge": (grid(1, 1, 16), "no image with these sizes"),
    "a grid of several frames": (grid(16, 1, 1), "no image with these sizes"),
    "an image above the limit": (large(), "limit of this model"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_a_hostile_item_is_refused(client: httpx2.Client, served: RunningService, name: str) -> None:
    item, message = ITEMS[name]
    payload = copy.deepcopy(STORED["one"]["render"])
    payload["features"]["kwargs_data"]["image"] = [item]
    refused(client, served, payload, message)


def test_another_model_is_404(client: httpx2.Client) -> None:
    answer = client.post(GENERATE, json=STORED["one"]["render"] | {"model": "gpt-5"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def refused(client: httpx2.Client, served: RunningService, payload: Payload, message: str) -> None:
    answer = client.post(GENERATE, json=payload)
    error = answer.json()["error"]
    assert (answer.status_code, message in error["message"]) == (400, True), answer.text
    shm = served.shm()
    assert (shm["blocks"], shm["bytes"]) == (0, 0)
    assert not [*(served.log.parent / "spool").glob("[!p]*")], "only the folder for plans, plans-*, may stay"


def _move(payload: Payload, by: int = 0, longer: int = 0, item: int = 0) -> None:
    place = payload["features"]["mm_placeholders"]["image"][item]
    place["offset"] += by
    place["length"] += longer


def _features(payload: Payload, name: str, value: Any) -> None:
    payload["features"][name] = value


def _second_placeholder(payload: Payload) -> None:
    place = payload["features"]["mm_placeholders"]["image"][0]
    payload["token_ids"][-1] = payload["token_ids"][place["offset"]]


def _swap_items(payload: Payload) -> None:
    payload["features"]["kwargs_data"]["image"].reverse()


def _gap(payload: Payload) -> None:
    _move(payload, longer=1)
    place = payload["features"]["mm_placeholders"]["image"][0]
    end = place["offset"] + place["length"] - 1
    ids = payload["token_ids"]
    ids[end - 1], ids[end] = ids[end], ids[end - 1]


def _as_video(payload: Payload) -> None:
    features = payload["features"]
    for name, value in features.items():
        features[name] = {"video": value["image"]}


BODIES: dict[str, tuple[Callable[[Payload], Any], str]] = {
    "no ids": (lambda p: p.update(token_ids=[]), "token_ids"),
    "a negative id": (lambda p: p["token_ids"].__setitem__(0, -5), "outside the vocabulary"),
    "a handle word": (lambda p: p["token_ids"].__setitem__(4, -(2**62)), "outside the vocabulary"),
    "an id above the vocabulary": (lambda p: p["token_ids"].__setitem__(0, 10**6), "outside the vocabulary"),
    "no tensors": (lambda p: _features(p, "kwargs_data", None), "mm_payload tensors"),
    "one tensor of two": (lambda p: p["features"]["kwargs_data"]["image"].pop(), "must be equal"),
    "one hash of two": (lambda p: p["features"]["mm_hashes"]["image"].pop(), "must be equal"),
    "an unknown kind": (lambda p: _features(p, "mm_hashes", {"smell": []}), "'smell'"),
    "a kind without ranges": (lambda p: _features(p, "mm_placeholders", {}), "must be equal"),
    "a negative offset": (lambda p: _move(p, by=-10), "offset"),
    "an empty range": (lambda p: _move(p, longer=-4), "length"),
    "a range behind the prompt": (lambda p: _move(p, longer=100, item=1), "ends at"),
    "ranges that overlap": (lambda p: _move(p, longer=10), "overlap"),
    "a range that is shifted": (lambda p: _move(p, by=1), "placeholders"),
    "a range that is too short": (lambda p: _move(p, longer=-1), "placeholders"),
    "a placeholder outside": (_second_placeholder, "placeholders"),
    "an id between placeholders": (_gap, "not those of its tensors"),
    "tensors of the other image": (_swap_items, "the numbers must be equal"),
    "images as videos": (_as_video, "no tensor video_grid_thw"),
    "raw media": (lambda p: p.update(content_parts=[{"type": "image_url", "url": "x"}]), "content_parts"),
    "features elsewhere": (lambda p: p.update(ec_transfer_params={"a": 1}), "ec_transfer_params"),
    "no sampling_params": (lambda p: p.pop("sampling_params"), "sampling_params"),
    "a negative temperature": (lambda p: p["sampling_params"].update(temperature=-1), "sampling_params.temperature"),
    "a token that does not exist": (lambda p: p["sampling_params"].update(stop_token_ids=[-1]), "stop_token_ids"),
    "unknown arguments": (lambda p: p["sampling_params"].update(extra_args={"a": 1}), "extra_args"),
    "more than the context": (lambda p: p["sampling_params"].update(max_tokens=2040), "context"),
    "reasoning before structured outputs": (
        lambda p: [p.update(reasoning_ended=False), p["sampling_params"].update(structured_outputs={"regex": "a"})],
        "reasoning_ended",
    ),
    "text without text": (lambda p: p.update(output_mode="text", sampling_params={"detokenize": False}), "detokenize"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused(client: httpx2.Client, served: RunningService, name: str) -> None:
    change, message = BODIES[name]
    payload = copy.deepcopy(STORED["two"]["render"])
    change(payload)
    refused(client, served, payload, message)


def test_payloads_count_like_chats(client: httpx2.Client) -> None:
    def counted() -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("mindie_mm:prompt_tokens_total"))

    before = counted()
    answer = post(client, GENERATE, STORED["one"]["render"])
    assert counted() - before == answer["usage"]["prompt_tokens"] == len(STORED["one"]["render"]["token_ids"])
