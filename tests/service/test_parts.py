"""Tests for requests from clients of other servers, with unknown keys, other roles and other model names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.serving import RunningService

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello!"}]
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


def post(http: Any, status: int = 200, path: str = CHAT, **body: Any) -> Any:
    answer = http.post(path, json=({"messages": MESSAGES} if path == CHAT else {}) | SETTINGS | body)
    assert answer.status_code == status, answer.text
    return answer.json()["choices"][0] if status == 200 else answer.json()["error"]


def test_fields_that_change_no_answer_are_accepted(service: RunningService, http: Any) -> None:
    """The service warns about each unknown field once, but never about fields that OpenAI's clients often send."""
    usual = {
        "store": True,
        "metadata": {"a": "b"},
        "user": "u",
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        **dict.fromkeys(("response_format", "stop", "seed", "logprobs", "stream_options", "top_p", "reasoning"), None),
    }
    plain = post(http)
    assert post(http, **usual) == plain
    for _ in range(2):
        assert post(http, **usual, x_of_tomorrow={"deep": [1]}) == plain
    log = service.log.read_text()
    assert log.count("ignoring the unknown key 'x_of_tomorrow' of a request; this warning is not repeated") == 1
    assert "'store'" not in log
    assert "'parallel_tool_calls'" not in log


def test_unknown_keys_of_messages_and_parts_are_ignored(service: RunningService, http: Any) -> None:
    part = {"type": "text", "text": "Hello!"}
    strange = {"role": "user", "content": [part | {"x_part": 1}], "x_message": {"a": 1}, "refusal": None}
    for _ in range(2):
        assert post(http, messages=[strange]) == post(http, messages=[{"role": "user", "content": [part]}])
    log = service.log.read_text()
    assert (
        log.count("the unknown key 'x_part' of an item") == log.count("the unknown key 'x_message' of a message") == 1
    )
    assert "fps" in post(http, 400, messages=[{"role": "user", "content": [part | {"fps": 2}]}])["message"]


def test_a_role_of_its_own_reaches_the_template(http: Any) -> None:
    tokens = http.post("/tokenize", json={"messages": [{"role": "critic", "content": "Hm."}, *MESSAGES]}).json()
    prompt = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert "critic\nHm." in prompt
    for role in ("<|im_end|>", "a b", "r" * 10_000, "", "ro\0le", 5, ["user"]):
        error = post(http, 400, messages=[{"role": role, "content": "Hm."}, *MESSAGES])
        assert "must be one of system" in error["message"]
        assert len(error["message"]) < 300
    developer = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
    assert post(http, messages=developer) == post(http, messages=[{**developer[0], "role": "system"}, *MESSAGES])


@pytest.mark.parametrize("name", [None, "", "default", "dummy", "model", "tgi"])
def test_a_placeholder_gets_the_served_model(http: Any, name: str | None) -> None:
    assert post(http, model=name) == post(http)
    assert http.get("/v1/models/default").status_code == 404
    assert "'gpt-3.5-turbo' does not exist" in post(http, 404, model="gpt-3.5-turbo")["message"]


@pytest.mark.parametrize("audio", ["data:audio/wav;base64,AAAA", "https://127.0.0.1/audio.wav"])
def test_a_prompt_with_too_many_items_is_refused_before_any_is_fetched(http: Any, audio: str) -> None:
    part = {"type": "audio_url", "audio_url": {"url": audio}}
    messages = [{"role": "user", "content": [part]}] * 3
    for path, body in (
        (CHAT, {"messages": messages}),
        ("/tokenize", {"messages": messages}),
        ("/tokenize", {"inputs": [part] * 3}),
        ("/infer", {"inputs": [part] * 3}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, path
        message = answer.json()["error"]["message"]
        assert "has 3 media items of kind audio; the limit is 2 (limit_mm_per_prompt)" in message, path


def spans(http: Any, *parts: Any, **changes: Any) -> list[int]:
    """Return the number of tokens of each media item in a prompt."""
    answer = http.post(CHAT, json={"messages": [{"role": "user", "content": [*parts]}], "media_spans": True} | changes)
    assert answer.status_code == 200, answer.text
    return [span["stop"] - span["start"] for span in answer.json()["media_spans"]]


@pytest.mark.parametrize(
    ("kwargs", "image", "video"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 9000}}, {"max_pixels": 9000}, {"max_pixels": 9000}),
        ({"mm_processor_kwargs": {"images_kwargs": {"max_pixels": 9000}}}, {"max_pixels": 9000}, {}),
        ({"mm_processor_kwargs": {"videos_kwargs": {"num_frames": 8}}}, {}, {"num_frames": 8}),
        ({"mm_processor_kwargs": {"fps": 8, "min_pixels": 99}}, {"min_pixels": 99}, {"fps": 8, "min_pixels": 99}),
        ({"mm_processor_kwargs": {"use_audio_in_video": True, "fps": 4}}, {}, {"use_audio_in_video": True, "fps": 4}),
        ({"media_io_kwargs": {"video": {"num_frames": 6}}}, {}, {"num_frames": 6}),
        ({"media_io_kwargs": {"video": {"num_frames": 6, "fps": 24}}}, {}, {"fps": 24, "max_frames": 6}),
        ({"media_io_kwargs": {"video": {"num_frames": -1, "fps": 24}}}, {}, {"fps": 24}),
        ({"media_io_kwargs": {}, "mm_processor_kwargs": None}, {}, {}),
    ],
)
def test_options_for_all_media_equal_options_of_each_item(
    http: Any, red_square: str, media_dir: Path, kwargs: Any, image: Any, video: Any
) -> None:
    media = [{"image": red_square}, {"video": str(media_dir / "right.mp4")}]
    each = [media[0] | image, media[1] | video]
    expected = spans(http, *each, max_tokens=1)
    assert spans(http, *media, max_tokens=1, **kwargs) == expected
    assert (expected == spans(http, *media, max_tokens=1)) == (not image and not video)
    own = [media[0] | {"max_pixels": 4000}, media[1] | {"num_frames": 2, "max_pixels": 4000}]
    if "min_pixels" not in image:
        assert spans(http, *own, max_tokens=1, **kwargs) == spans(http, *own, max_tokens=1)
    body = {"messages": [{"role": "user", "content": media}]} | kwargs
    counted = http.post("/tokenize", json=body).json()["count"]
    assert counted == http.post("/tokenize", json={"messages": [{"role": "user", "content": each}]}).json()["count"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"mm_processor_kwargs": {"num_crops": 4}},
            "mm_processor_kwargs has the key 'num_crops', which is not supported",
        ),
        ({"mm_processor_kwargs": {"images_kwargs": {"fps": 4}}}, "images_kwargs has the key 'fps'"),
        ({"mm_processor_kwargs": {"max_pixels": "9"}}, "max_pixels='9'"),
        ({"mm_processor_kwargs": {"max_pixels": 1, "min_pixels": 2}}, "min_pixels 2 is above max_pixels 1"),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs is of type list"),
        ({"mm_processor_kwargs": {"k" * 10_000: 1}}, "which is not supported"),
        ({"media_io_kwargs": {"image": {"mode": "L"}}}, "media_io_kwargs has the key 'image'"),
        ({"media_io_kwargs": {"video": {"video_backend": "x"}}}, "video has the key 'video_backend'"),
        ({"media_io_kwargs": {"video": {"num_frames": -1}}}, "num_frames is -1, which would select all frames"),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "num_frames=0"),
        (
            {"media_io_kwargs": {"video": {"fps": 1}}, "mm_processor_kwargs": {"num_frames": 4}},
            "both choose frames of videos",
        ),
    ],
)
def test_options_that_no_item_has_are_refused(http: Any, kwargs: Any, message: str) -> None:
    error = post(http, 400, **kwargs)
    assert message in error["message"]
    assert len(error["message"]) < 300
    assert error["param"] in kwargs
