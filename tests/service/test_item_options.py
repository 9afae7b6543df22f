"""Tests for the item options that change how many tokens an image or a video needs."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tools.demo import data_url


def media_tokens(http: Any, item: dict[str, Any], kind: str) -> int:
    messages = [{"role": "user", "content": [item, {"type": "text", "text": "What is it?"}]}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    num_tokens: int = answer.json()["usage"]["prompt_tokens_details"][f"{kind}_tokens"]
    return num_tokens


def test_min_and_max_pixels_change_the_tokens_of_an_image(http: Any, red_square: str) -> None:
    plain = media_tokens(http, {"image": red_square}, "image")
    fewer = media_tokens(http, {"image": red_square, "max_pixels": 3136}, "image")
    assert fewer < plain
    nested = {"type": "image_url", "image_url": {"url": red_square, "max_pixels": 3136}}
    beside = {"type": "image_url", "image_url": {"url": red_square}, "max_pixels": 3136}
    assert media_tokens(http, nested, "image") == media_tokens(http, beside, "image") == fewer
    small = data_url(Image.new("RGB", (30, 30), "red"))
    assert media_tokens(http, {"image": small, "min_pixels": 12_000}, "image") > media_tokens(
        http, {"image": small}, "image"
    )


def test_num_frames_and_fps_change_the_tokens_of_a_video(http: Any, media_dir: Path) -> None:
    url = str(media_dir / "right.mp4")
    two, six = (media_tokens(http, {"video": url, "num_frames": n}, "video") for n in (2, 6))
    assert six == 3 * two
    slow, fast = (media_tokens(http, {"video": url, "fps": fps, "min_frames": 2}, "video") for fps in (1, 8))
    assert slow < fast


def test_a_video_may_be_a_list_of_frames(http: Any, red_square: str, media_dir: Path) -> None:
    """The formats of vLLM, qwen-vl-utils and Hugging Face are accepted. Frames may be files or data URLs."""
    encoded = red_square.partition(",")[2]
    frames = [red_square] * 4
    star = str(media_dir / "green_star.jpg")
    four = media_tokens(http, {"type": "video", "video": frames, "sample_fps": 2}, "video")
    for item in (
        {"type": "video_url", "video_url": {"url": frames}},
        {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join([encoded] * 4)}"}},
        {"video_url": frames, "sample_fps": 0.5},
        {"video": [star, f"file://{star}"] * 2},
        {"video": [red_square] * 8, "sample_fps": 4, "fps": 2},
        {"video": [red_square] * 8, "num_frames": 4},
    ):
        assert media_tokens(http, item, "video") == four, item
    assert media_tokens(http, {"video": frames[:2]}, "video") == four // 2


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            {"video": ["/etc/hostname"]},
            "media item 0 (video): frame 0: there is no such file in the allowed media folder",
        ),
        ({"video": ["http://127.0.0.1:9/a.jpg"]}, "frame 0: could not fetch from 127.0.0.1: its address is not public"),
        ({"video": ["RED", "data:image/png;base64,AAAA"]}, "frame 1: the 3 bytes cannot be read as an image"),
        ({"video": ["RED", "STAR"]}, "all frames of a video must have the same size"),
        (
            {"video": ["RED"] * 4, "fps": 1},
            "fps is 1, but the frames have no rate; set sample_fps to the rate at which they were sampled",
        ),
        ({"video": ["RED"] * 4, "sample_fps": 2e-6}, "the video lasts"),
        ({"video": []}, "video is an empty list"),
        ({"video": "MOVIE", "sample_fps": 2}, "sample_fps is 2, but an encoded video has its own rate"),
    ],
    ids=str,
)
def test_invalid_frames_are_refused(
    http: Any, red_square: str, media_dir: Path, item: dict[str, Any], message: str
) -> None:
    small = data_url(Image.new("RGB", (30, 30), "red"))
    named = {"RED": red_square, "STAR": small, "MOVIE": str(media_dir / "right.mp4")}
    video = item["video"]
    given = named[video] if isinstance(video, str) else [named.get(frame, frame) for frame in video]
    answer = http.post("/infer", json={"inputs": [item | {"video": given}, {"text": "x"}]})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "options", [{"max_pixels": True}, {"max_pixels": 1.5}, {"max_pixels": "9"}, {"min_pixels": 9, "max_pixels": 8}]
)
def test_invalid_pixel_limits_are_refused(http: Any, red_square: str, options: dict[str, Any]) -> None:
    answer = http.post("/infer", json={"inputs": [{"image": red_square, **options}, {"text": "x"}]})
    assert answer.status_code == 400
    assert "pixels" in answer.json()["error"]["message"]


@pytest.mark.parametrize("options", [{"fps": 0}, {"fps": "2"}, {"fps": 1, "num_frames": 4}, {"num_frames": 0}])
def test_invalid_frame_options_are_refused(http: Any, media_dir: Path, options: dict[str, Any]) -> None:
    item = {"video": str(media_dir / "right.mp4"), **options}
    assert http.post("/infer", json={"inputs": [item, {"text": "x"}]}).status_code == 400
