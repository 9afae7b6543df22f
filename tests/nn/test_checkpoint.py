"""A checkpoint directory's files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint import Checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    added = [{"content": f"<{index}>", "id": index} for index in range(3)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return Checkpoint.open(tmp_path)


def test_a_file_is_read_once(checkpoint):
    read = checkpoint.json("tokenizer.json")
    (checkpoint.path / "tokenizer.json").write_text("{}")
    assert checkpoint.json("tokenizer.json") is read
    assert [checkpoint.token_id(f"<{index}>") for index in range(3)] == [0, 1, 2]
    assert replace(checkpoint, config={"part": 1}).token_id("<2>") == 2
    with pytest.raises(UnsupportedCheckpoint, match="no added token <2>"):
        Checkpoint.open(checkpoint.path).token_id("<2>")


def test_a_file_that_is_not_there_has_nothing(checkpoint):
    assert checkpoint.json("processor_config.json") == {}
    assert checkpoint.special_token("bos_token") is None
