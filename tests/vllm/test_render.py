"""Tests of ids, ranges and hashes of media against the stored answers of vLLM."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindie_mm.errors import InputError
from mindie_mm.inputs import Media, media_defaults, with_defaults
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.requests import TokenizeRequest, request_of_messages
from service.render.answer import Hashing, features, like_vllm
from tests.vllm.stored import ANSWERS, essence, stored_chats

FAMILIES = sorted(path.stem for path in ANSWERS.glob("*.json"))
CHATS = stored_chats()
DIFFERENT: dict[str, str] = {
    "text": "vLLM encodes control tokens in the text of users as control tokens",
}
"""Chats whose answers differ on purpose, and why."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """Yield the tokenizer of the small checkpoint for which vLLM's answers are stored."""
    from tests.vllm.checkpoints import write

    with Tokenizer.from_pretrained(write(family, tmp_path_factory.mktemp("vllm") / family)) as opened:
        yield opened


def rendered(tokenizer: Tokenizer, body: dict[str, Any], model_id: str, folder: Path) -> dict[str, Any]:
    """Return what /render answers."""
    options = (body.get("mm_processor_kwargs"), body.get("media_io_kwargs"))
    request = request_of_messages(body["messages"], add_generation_prompt=body.get("add_generation_prompt", True))
    assert request.messages is not None
    messages = with_defaults(request.messages, media_defaults(*options))
    request = like_vllm(TokenizeRequest(messages=messages, add_generation_prompt=request.add_generation_prompt))
    (plan,) = tokenizer.run(tokenizer.prompts.plan([request]))
    files = [_file(media, folder / str(index)) for index, media in enumerate(request.media)]
    hashing = Hashing.of(model_id, MediaCaps().rgba_background_color, *options)
    return {"token_ids": plan.ids.tolist(), "features": features(plan, request.media, files, hashing)}


def _file(media: Media, path: Path) -> Path:
    path.write_bytes(base64.b64decode(media.source.partition(",")[2]))
    return path


def test_ids_ranges_and_hashes_equal_vllms(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    answers = json.loads((ANSWERS / f"{family}.json").read_text())["answers"]
    different = []
    for name, body in CHATS.items():
        try:
            ours = essence(rendered(tokenizer, body, family, tmp_path))
        except InputError:
            ours = {"status": 400}
        if ours != answers[name]:
            different.append(name)
    assert different == [name for name in CHATS if name in DIFFERENT]
