"""Options of single items over HTTP: how many tokens a picture or a video takes."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tools.demo import data_url


def media_tokens(http: Any, item: dict[str, Any], kind: str) -> int:
    messages = [{"role": "user", "content": [item, {"type": "text", "text": "What is it?"}]}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"][f"{kind}_tokens"]
    return found


def test_pixels(http: Any, red_square: str) -> None:
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


def test_frames(http: Any, media_dir: Path) -> None:
    url = str(media_dir / "right.mp4")
    two, six = (media_tokens(http, {"video": url, "num_frames": n}, "video") for n in (2, 6))
    assert six == 3 * two
    slow, fast = (media_tokens(http, {"video": url, "fps": fps, "min_frames": 2}, "video") for fps in (1, 8))
    assert slow < fast


@pytest.mark.parametrize(
    "options", [{"max_pixels": True}, {"max_pixels": 1.5}, {"max_pixels": "9"}, {"min_pixels": 9, "max_pixels": 8}]
)
def test_bad_options(http: Any, red_square: str, options: dict[str, Any]) -> None:
    answer = http.post("/infer", json={"inputs": [{"image": red_square, **options}, {"text": "x"}]})
    assert answer.status_code == 400
    assert "pixels" in answer.json()["error"]["message"]


@pytest.mark.parametrize("options", [{"fps": 0}, {"fps": "2"}, {"fps": 1, "num_frames": 4}, {"num_frames": 0}])
def test_bad_video_options(http: Any, media_dir: Path, options: dict[str, Any]) -> None:
    item = {"video": str(media_dir / "right.mp4"), **options}
    assert http.post("/infer", json={"inputs": [item, {"text": "x"}]}).status_code == 400
