"""Tests for media that a chat names by `uuid`, with and without their data."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mindie_mm.errors import InputError
from mindie_mm.inputs import Media, Message, media_of_messages
from service.request import kept_media
from service.request.kept_media import KeptMedia
from tests.audio_samples import encode_audio, tone
from tests.service.conftest import MEDIA_UUID_BYTES, KiB
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

CHAT = "/v1/chat/completions"
QUESTION = {"type": "text", "text": "What is in the image?"}
GREEN_STAR = data_url(draw_shape("green", (40, 160, 60), "star", x=0.5))
NO_DATA = "no data are kept for the uuid"
WITHOUT_DATA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": None},
    {"type": "image_url"},
    {"image_url": None},
    {"type": "image_url", "image_url": {}},
    {"type": "image_url", "image_url": {"url": None, "detail": "auto"}},
    {"type": "image", "image": None},
]


def image(url: str | None, uuid: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, "uuid": uuid} | more


def post(http: Any, *parts: Any, key: str | None = None, status: int = 200, **changes: Any) -> Any:
    """Return an answer without the fields that differ between requests, or the message of an error."""
    body = {"messages": [{"role": "user", "content": [*parts, QUESTION]}], "temperature": 0, "max_tokens": 12} | changes
    answer = http.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == status, answer.text
    if status != 200:
        return answer.json()["error"]["message"]
    found = answer.json()
    return found["choices"], found["usage"]["prompt_tokens"]


@pytest.mark.parametrize("left_out", WITHOUT_DATA, ids=str)
def test_an_item_that_is_kept_needs_no_data(http: Any, red_square: str, left_out: dict[str, Any]) -> None:
    plain = post(http, image(red_square))
    assert "red square" in plain[0][0]["message"]["content"]
    uuid = f"hit {left_out}"
    assert NO_DATA in post(http, left_out | {"uuid": uuid}, status=400)
    assert post(http, image(red_square, uuid)) == plain
    for _ in range(2):
        assert post(http, left_out | {"uuid": uuid}) == plain
    tokenized = [
        http.post("/tokenize", json={"messages": [{"role": "user", "content": [part]}]}).json()["tokens"]
        for part in (image(red_square), left_out | {"uuid": uuid})
    ]
    assert tokenized[0] == tokenized[1]


def test_a_stream_of_the_openai_client_answers_about_kept_items(
    client: openai.OpenAI, service: RunningService, red_square: str
) -> None:
    parts: list[list[Any]] = [
        [image(red_square, "a"), image(GREEN_STAR, "b")],
        [image(None, "b"), image(red_square)],
        [image(red_square, "c"), image(None, "a")],
    ]
    texts = []
    for content in parts:
        messages: Any = [{"role": "user", "content": [*content, QUESTION]}]
        chunks = client.chat.completions.create(
            model=service.model, messages=messages, temperature=0, max_tokens=12, stream=True
        )
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    resent: Any = [{"role": "user", "content": [image(GREEN_STAR), image(red_square), QUESTION]}]
    whole = client.chat.completions.create(model=service.model, messages=resent, temperature=0, max_tokens=12)
    assert whole.choices[0].message.content == texts[1]
    assert service.wait_until_free()["blocks"] == 0


def test_a_video_its_frames_and_an_audio_clip_are_kept(http: Any, media_dir: Path, red_square: str) -> None:
    audio = base64.b64encode(encode_audio(tone(0.5), 16_000)).decode()
    frames = [red_square, GREEN_STAR, red_square, GREEN_STAR]
    for uuid, part, left_out in (
        (
            "video",
            {"type": "video_url", "video_url": {"url": str(media_dir / "right.mp4")}},
            {"type": "video_url", "video_url": None},
        ),
        (
            "frames",
            {"type": "video_url", "video_url": {"url": frames}, "sample_fps": 2},
            {"type": "video_url", "sample_fps": 2},
        ),
        (
            "audio",
            {"type": "input_audio", "input_audio": {"data": audio, "format": "wav"}},
            {"type": "input_audio", "input_audio": {"data": None, "format": "wav"}},
        ),
        (
            "audio by URL",
            {"type": "audio_url", "audio_url": {"url": f"data:;base64,{audio}"}},
            {"type": "audio_url", "audio_url": None},
        ),
    ):
        plain = post(http, part)
        assert post(http, part | {"uuid": uuid}) == plain
        assert post(http, left_out | {"uuid": uuid}) == plain


def test_a_kept_item_gets_the_options_of_the_request(http: Any, media_dir: Path) -> None:
    video = {"type": "video_url", "video_url": {"url": str(media_dir / "right.mp4")}}
    post(http, video | {"uuid": "clip"})
    for options in ({"num_frames": 2}, {"num_frames": 4}):
        left_out = {"type": "video_url", "video_url": None, "uuid": "clip"}
        plain = post(http, video | options)
        assert post(http, left_out | options) == plain
        assert post(http, left_out, media_io_kwargs={"video": options}) == plain


def test_new_data_replace_the_item_of_a_uuid(http: Any, red_square: str) -> None:
    plain = [post(http, image(url)) for url in (red_square, GREEN_STAR)]
    for url, expected in ((red_square, plain[0]), (GREEN_STAR, plain[1])):
        assert post(http, image(url, "changing")) == expected
        assert post(http, image(None, "changing")) == expected


def test_an_item_belongs_to_its_key_salt_and_kind(http: Any, red_square: str) -> None:
    hit: dict[str, Any] = {"key": "one", "cache_salt": "salt"}
    misses = [hit | {"key": "two"}, hit | {"cache_salt": "other"}, hit | {"cache_salt": None}, hit | {"key": None}]
    post(http, image(red_square, "mine"), **hit)
    for given in misses:
        assert NO_DATA in post(http, image(None, "mine"), status=400, **given)
    for kind in ("video_url", "input_audio"):
        assert NO_DATA in post(http, {"type": kind, "uuid": "mine"}, status=400, **hit)
    post(http, image(GREEN_STAR, "mine"), **misses[0])
    assert "red square" in post(http, image(None, "mine"), **hit)[0][0]["message"]["content"]


def noise(size: int) -> str:
    """Return an image of about `size` bytes, which no other call returns."""
    side = round((size / 3) ** 0.5)
    header = b"P6 %d %d 255\n" % (side, side)
    return "data:;base64," + base64.b64encode(header + os.urandom(side * side * 3)).decode()


def test_the_items_that_were_used_last_are_kept(http: Any, red_square: str) -> None:
    size = MEDIA_UUID_BYTES // 3 - KiB
    post(http, image(noise(size), "old"))
    post(http, image(red_square, "used"))
    for number in range(4):
        post(http, image(noise(size), f"noise {number}"))
        post(http, image(None, "used"))
    assert NO_DATA in post(http, image(None, "old"), status=400)
    assert NO_DATA in post(http, image(None, "noise 0"), status=400)
    post(http, image(None, "noise 3"))
    # An item that is larger than the whole store is used but not kept, and the earlier item with its uuid is removed.
    post(http, image(noise(MEDIA_UUID_BYTES + 4 * KiB), "used"))
    assert NO_DATA in post(http, image(None, "used"), status=400)
    post(http, image(None, "noise 3"))


def test_an_item_that_cannot_be_read_is_not_kept(http: Any) -> None:
    broken = "data:;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n and nothing else").decode()
    post(http, image(broken, "broken"), status=400)
    assert NO_DATA in post(http, image(None, "broken"), status=400)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (image(GREEN_STAR, "u" * 10_000), "uuid has 10000 characters; the limit is 256"),
        (image(None, "u" * 10_000), "uuid has 10000 characters; the limit is 256"),
        (image(None, "a\0b"), "cannot be printed"),
        (image(GREEN_STAR, "a\ud800"), "cannot be printed"),
        (image(GREEN_STAR, 5), "uuid is of type int; it must be a string"),
        (image(GREEN_STAR, ["a"]), "uuid is of type list; it must be a string"),
        (image(None, ""), "image_url.url is missing; it must be a string"),
        (
            {"type": "image_url", "uuid": "x"},
            "media item 0 (image): Cache miss for image at index 0 but data is not provided: no data are kept",
        ),
        ({"uuid": "x"}, "exactly one of text, image, video, audio"),
        ({"image_url": None, "video_url": None, "uuid": "x"}, "found 'image_url' and 'video_url'"),
        (
            {"type": "image_url", "video_url": None, "uuid": "x"},
            "type is 'image_url', but the item has the key 'video_url'",
        ),
        ({"type": "file", "file": None, "uuid": "x"}, "exactly one of text, image, video, audio"),
        ({"document": None, "uuid": "x"}, "document is missing"),
        (image(None, "x", fps=3), "fps"),
    ],
    ids=lambda given: str(given)[:60],
)
def test_a_uuid_that_names_no_item_is_refused(http: httpx2.Client, part: Any, message: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    for path in (CHAT, "/tokenize"):
        answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], message in error["message"]) == (400, "messages", True), error


def test_other_routes_keep_no_media(http: Any, red_square: str) -> None:
    item = {"image_url": red_square, "uuid": "native"}
    assert http.post("/infer", json={"inputs": [item, {"text": "Hello!"}]}).status_code == 200
    answer = http.post("/infer", json={"inputs": [item | {"image_url": None}]})
    assert "media are not kept by uuid here" in answer.json()["error"]["message"]
    assert NO_DATA in post(http, image(None, "native"), status=400)


def chat_of(*uuids: str) -> list[Message]:
    return [Message("user", tuple(Media("image", None, uuid=uuid) for uuid in uuids))]


def test_the_number_of_kept_items_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_media, "MAX_ENTRIES", 3)
    (tmp_path / "file").write_bytes(b"data")
    kept = KeptMedia(100)
    names = ["a", "b", "c", "d"]
    media = [Media("image", "data:,", uuid=name) for name in names]
    asyncio.run(kept.keep(media, [tmp_path / "file"] * 4, b"owner", ""))
    assert (len(kept), kept.num_bytes) == (3, 12)
    found = media_of_messages(kept.filled(chat_of("b", "c", "d"), b"owner", ""))
    assert [(item.source, item.uuid) for item in found] == [(b"data", name) for name in "bcd"]
    with pytest.raises(InputError, match="no data are kept for the uuid 'a'"):
        kept.require_sources(media_of_messages(kept.filled(chat_of("a"), b"owner", "")), [None])


def test_a_service_that_keeps_nothing_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    kept = KeptMedia(0)
    asyncio.run(kept.keep([Media("image", "data:,", uuid="a")], [tmp_path / "file"], b"owner", ""))
    with pytest.raises(InputError, match=r"media item 1 \(image\): media are not kept by uuid \(--media-uuid-bytes is"):
        kept.require_sources([Media("image", "data:,"), *media_of_messages(chat_of("a"))], [None, None])


def test_an_item_whose_plan_is_known_needs_no_data_and_counts() -> None:
    media = media_of_messages(chat_of("a", "b"))
    KeptMedia(100).require_sources(media, ["plan", "plan"])
    with pytest.raises(InputError, match=r"media item 1 \(image\): Cache miss for image at index 1 .* the uuid 'b'"):
        KeptMedia(100).require_sources(media, ["plan", None])
