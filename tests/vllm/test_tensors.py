"""Tests for the tensors of images against the stored digests of vLLM's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.json import encode

from mindie_mm.errors import InputError
from mindie_mm.inputs import media_defaults, parse_messages, with_defaults
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.requests import TokenizeRequest
from service.render.answer import Tensors, features, like_vllm
from tests.vllm.tensors import SERVERS, STORED, TILES, chats_of, items_of

STORED_TENSORS = json.loads(STORED.read_text())
REFUSED = {"min_pixels and max_pixels"}
"""Chats that may be refused, because an option is beyond the checkpoint's limits."""
OF_SIZES = {"max_pixels", "uuid and max_pixels"}
"""Chats that families of tiles refuse, because their tiles have a fixed size."""
OTHER_PIXELS = {"PNG I;16", "PNG with a transparent color"}
"""Chats whose images look otherwise in vLLM (docs/render.md)."""


@pytest.mark.parametrize("server", STORED_TENSORS)
def test_tensors_equal_vllms(server: str, tmp_path: Path) -> None:
    from tests.vllm.checkpoints import write

    family, dtype = SERVERS[server]
    different, path_file, chats = [], tmp_path / "shm_name.txt", chats_of(family)
    path_file.touch(0o600)
    with Tokenizer.from_pretrained(write(family, tmp_path / family)) as tokenizer:
        tensors = Tensors.known(tokenizer.prompts.traits, dtype)
        for name, expected in STORED_TENSORS[server].items():
            body = chats[name]
            options = (body.get("mm_processor_kwargs"), body.get("media_io_kwargs"))
            messages = with_defaults(parse_messages(body["messages"], by_uuid=True), media_defaults(*options))
            request = like_vllm(TokenizeRequest(messages=messages, path_file=str(path_file)))
            try:
                (plan,) = tokenizer.run(tokenizer.prompts.plan([request], fill=True))
            except InputError:
                different += [] if name in REFUSED | (OF_SIZES if family in TILES else set()) else [name]
                continue
            found = features(plan, [""] * len(plan.spans), tensors)
            release(path_file)
            if items_of(json.loads(encode(found))) != expected:
                different.append(name)
    assert {*different} == OTHER_PIXELS
