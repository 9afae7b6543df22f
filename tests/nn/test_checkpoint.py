"""Tests for reading the files of a checkpoint directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    added = [{"content": f"<{index}>", "id": index} for index in range(3)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return Checkpoint.open(tmp_path)


@contextmanager
def another_user() -> Iterator[None]:
    """Run as an unprivileged user, because file permissions do not apply to root."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.mark.parametrize("closed", [".", "config.json"])
def test_an_unreadable_folder_or_file_is_refused(checkpoint, closed):
    """A folder may be readable only by its owner, such as a folder of root that is mounted into a container."""
    (checkpoint.path / closed).chmod(0)
    message = "cannot be read: Permission denied"
    try:
        with another_user(), pytest.raises(UnsupportedCheckpoint, match=message):
            Checkpoint.open(checkpoint.path)
        if closed == ".":
            with another_user(), pytest.raises(UnsupportedCheckpoint, match=message):
                checkpoint.json("tokenizer.json")
    finally:
        (checkpoint.path / closed).chmod(0o700)


def test_a_file_is_read_once(checkpoint):
    read = checkpoint.json("tokenizer.json")
    (checkpoint.path / "tokenizer.json").write_text("{}")
    assert checkpoint.json("tokenizer.json") is read
    assert [checkpoint.token_id(f"<{index}>") for index in range(3)] == [0, 1, 2]
    assert replace(checkpoint, config={"part": 1}).token_id("<2>") == 2
    with pytest.raises(UnsupportedCheckpoint, match="no added token <2>"):
        Checkpoint.open(checkpoint.path).token_id("<2>")


def test_a_missing_file_reads_as_empty(checkpoint):
    assert checkpoint.json("processor_config.json") == {}
    assert checkpoint.special_token("bos_token") is None


def test_a_path_that_is_not_utf_8_is_refused(tmp_path):
    """The packages tokenizers and safetensors only accept paths that are valid UTF-8."""
    folder = tmp_path / os.fsdecode(b"m\xe8")
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsupportedCheckpoint, match=r"m\\xe8', is not UTF-8"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / name).write_text("{}")
    Checkpoint.open(tmp_path)
    settings = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct", "use_dora": True}
    (tmp_path / name).write_text(json.dumps(settings))
    message = "a LORA adapter of Qwen/Qwen2-VL-2B" if name == "adapter_config.json" else "an adapter of the base model"
    with pytest.raises(UnsupportedCheckpoint, match=rf"has {name}, {message}.*--lora NAME=FOLDER.*merge_and_unload"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"thinker_config": {"vision_config": {"num_heads": 0}}}, r"thinker_config\.vision_config\.num_heads=0"),
        ({"vision_config": {"patch_size": [14, 0]}}, r"vision_config\.patch_size=\[14, 0\]"),
    ],
)
def test_sizes_that_are_not_positive_are_refused(tmp_path, config, named):
    (tmp_path / "config.json").write_text(json.dumps(config | {"v_head_dim": 0, "head_dim": None}))
    with pytest.raises(UnsupportedCheckpoint, match=f"config.json: {named} must be positive"):
        Checkpoint.open(tmp_path)
