"""Tests for ids, ranges and hashes of media against the stored answers of vLLM."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mindie_mm.errors import InputError
from mindie_mm.inputs import KnownPlan, Media, media_defaults, parse_messages, with_defaults
from mindie_mm.media.guard.caps import VideoSample
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PlannedSpan
from mindie_mm.tokenize.requests import TokenizeRequest
from service.render.answer import Hashing, features, hashes_of, like_vllm
from service.render.media_hash import FileContent, media_hash
from tests.vllm.stored import ANSWERS, VIDEO_FAMILIES, essence, has_video, stored_chats

FAMILIES = sorted(path.stem for path in ANSWERS.glob("*.json"))
CHATS = stored_chats()
REFUSED = {"status": 400}
CONTROL_TOKENS = "text"
"""Chat whose ids differ on purpose: vLLM reads control tokens in the text of users."""
HASHED_OTHERWISE = {"0.33.0": ["PNG with a transparent color"]}
"""Chats whose hash differs in a version of vLLM, which covers the background color, too."""
REFUSED_BY_VLLM = {"two images", "the same image twice"}
"""Chats that vLLM refuses for a family whose adjacent images share a token of line breaks."""
PIXELS = {"max_pixels", "min_pixels and max_pixels", "uuid and max_pixels", "images_kwargs"}
"""Chats that may be refused, because images have a fixed size, or an option is beyond the checkpoint's limits."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """Yield the tokenizer of the small checkpoint for which vLLM's answers are stored."""
    from tests.vllm.checkpoints import write

    with Tokenizer.from_pretrained(write(family, tmp_path_factory.mktemp("vllm") / family)) as opened:
        yield opened


def request_of(body: dict[str, Any]) -> TokenizeRequest:
    options = (body.get("mm_processor_kwargs"), body.get("media_io_kwargs"))
    messages = with_defaults(parse_messages(body["messages"], by_uuid=True), media_defaults(*options))
    opens_turn = body.get("add_generation_prompt", True)
    return like_vllm(TokenizeRequest(messages=messages, add_generation_prompt=opens_turn))


def rendered(tokenizer: Tokenizer, body: dict[str, Any], model_id: str, folder: Path) -> dict[str, Any]:
    """Return what /render answers."""
    options = (body.get("mm_processor_kwargs"), body.get("media_io_kwargs"))
    request = request_of(body)
    (plan,) = tokenizer.run(tokenizer.prompts.plan([request]))
    media = [(item, _file(item, folder / str(index))) for index, item in enumerate(request.media)]
    hashing = Hashing.of(model_id, MediaCaps().rgba_background_color, *options)
    return {"token_ids": plan.ids.tolist(), "features": features(plan, hashes_of(plan, media, hashing))}


def _file(media: Media, path: Path) -> Path:
    path.write_bytes(base64.b64decode(media.source.partition(",")[2]))
    return path


def test_ids_ranges_and_hashes_equal_vllms(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored = json.loads((ANSWERS / f"{family}.json").read_text())
    answers, different = stored["answers"], []
    for name, body in CHATS.items():
        if has_video(body) and family not in VIDEO_FAMILIES:
            continue
        try:
            ours = essence(rendered(tokenizer, body, family, tmp_path))
        except InputError:
            ours = REFUSED
        is_refused = (ours == REFUSED and name in PIXELS) or (answers[name] == REFUSED and name in REFUSED_BY_VLLM)
        if ours != answers[name] and not is_refused:
            different.append(name)
    assert {*different} <= {CONTROL_TOKENS, *HASHED_OTHERWISE.get(stored["vllm"], ())}


def test_a_chat_without_media_begins_as_in_vllm(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The ids of this chat are equal up to the control tokens."""
    answer = json.loads((ANSWERS / f"{family}.json").read_text())["answers"][CONTROL_TOKENS]
    ours = essence(rendered(tokenizer, CHATS[CONTROL_TOKENS], family, tmp_path))
    assert ours["token_ids"][:5] == answer["token_ids"][:5]


def test_media_that_were_planned_before_need_no_source(family: str, tokenizer: Tokenizer) -> None:
    num_media = 0
    for body in [*CHATS.values()][::5]:
        request = request_of(body)
        try:
            (plan,) = tokenizer.run(tokenizer.prompts.plan([request]))
        except InputError:
            continue
        known = iter([KnownPlan(span.plan, span.digest) for span in plan.spans])
        again = request.with_media(lambda one, known=known: replace(one, source=None, known=next(known)))
        (same,) = tokenizer.run(tokenizer.prompts.plan([again]))
        assert (same.ids.tolist(), same.spans) == (plan.ids.tolist(), plan.spans)
        num_media += len(plan.spans)
    assert num_media > 3, "not all chats are refused"


def test_videos_are_refused_if_vllm_takes_none(tmp_path: Path) -> None:
    from tests.vllm.checkpoints import write

    with Tokenizer.from_pretrained(write("smolvlm", tmp_path / "smolvlm")) as tokenizer:
        with pytest.raises(InputError, match=r"vLLM takes no videos for this model.* --like transformers"):
            rendered(tokenizer, CHATS["video of 30 frames"], "smolvlm", tmp_path)
        assert rendered(tokenizer, CHATS["28x28"], "smolvlm", tmp_path)["features"] is not None


def test_a_video_with_less_pixels_than_bytes_has_a_hash_of_its_own(tmp_path: Path) -> None:
    """Of such a video, vLLM hashes the decoded frames."""
    files = {}
    for name, num_bytes in (("small", 10), ("large", 10_000)):
        sample = VideoSample(30, 10.0, (0, 10, 20, 29), num_bytes)
        span = PlannedSpan(0, 4, "video", 7, num_features=4, num_bytes=1, digest=b"digest", sample=sample)
        (tmp_path / name).write_bytes(bytes(1000))
        media = Media("video", str(tmp_path / name))
        files[name] = Hashing.of("model", (255, 255, 255), None, None).hash_of(span, media, tmp_path / name)
    assert files["small"] == b"digest".hex()
    assert len(files["large"]) == 64


def test_vllm_0_33_hashes_the_background_of_a_transparent_color() -> None:
    """Everything else of its answers to the stored chats about images equals 0.32's, for all families."""
    (part, _) = CHATS["PNG with a transparent color"]["messages"][0]["content"]
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    content = FileContent("image", data, MediaCaps().rgba_background_color)
    of_0_33 = "881edec1d3ea87357c13c15584585e73db1c4de6d2d1244ece11e371f02f7de5"
    assert media_hash("image", content, "qwen2vl", {}) == of_0_33
