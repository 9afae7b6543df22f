"""Tests for end-of-sequence tokens, which published checkpoints specify in one or more of many files."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import EMBEDDED, Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids

END = {"eos_token": "</s>"}
AS_ADDED_TOKEN = {"eos_token": {"content": "</s>", "__type": "AddedToken", "special": True}}
TOKENIZER = {"added_tokens": [{"content": "</s>", "id": 7, "special": True}]}
NEW: dict[str, Any] = {"added_tokens_decoder": {}}
"""Settings from a release of transformers that ignores special_tokens_map.json."""


def read_end_tokens(folder: Path, **files: Any) -> tuple[int, ...]:
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return eos_token_ids(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 9}}, (5, 6)),
        ({"generation_config": {"pad_token_id": 1}, "config": {"eos_token_id": 0}}, (0,)),
        ({"generation_config": {"eos_token_id": None}, "config": {"text_config": {"eos_token_id": 4}}}, (4,)),
        ({"config": {"llm_config": {"eos_token_id": 3}}}, (3,)),
        ({"config": {"eos_token_id": 2}, "tokenizer_config": END, "tokenizer": TOKENIZER}, (2, 7)),
        ({"config": {"eos_token_id": [7, 2]}, "tokenizer_config": END, "tokenizer": TOKENIZER}, (7, 2)),
        ({"tokenizer_config": END, "tokenizer": TOKENIZER}, (7,)),
        ({"tokenizer_config": AS_ADDED_TOKEN, "tokenizer": TOKENIZER}, (7,)),
        ({"special_tokens_map": END, "tokenizer": TOKENIZER}, (7,)),
        ({"special_tokens_map": AS_ADDED_TOKEN, "tokenizer": TOKENIZER}, (7,)),
        ({"tokenizer_config": {"eos_token": "<a>"}, "special_tokens_map": END, "tokenizer": TOKENIZER}, (7,)),
        (
            {"tokenizer_config": {**END, **NEW}, "special_tokens_map": {"eos_token": "<a>"}, "tokenizer": TOKENIZER},
            (7,),
        ),
        ({"tokenizer_config": {**END, "added_tokens_decoder": {"8": {"content": "</s>"}}}}, (8,)),
        ({"tokenizer_config": END, "added_tokens": {"</s>": 9}}, (9,)),
        ({"tokenizer_config": END, "tokenizer": {"model": {"vocab": {"a": 0, "</s>": 1}}}}, (1,)),
        ({"tokenizer_config": END, "tokenizer": {"model": {"vocab": [["a", -1.0], ["</s>", 0.0]]}}}, (1,)),
    ],
)
def test_every_file_that_may_name_an_end_token_is_read(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert read_end_tokens(tmp_path, **files) == expected


@pytest.mark.parametrize("files", [{}, {"tokenizer_config": END}, {"tokenizer_config": {"eos_token": None}}])
def test_a_checkpoint_without_an_end_token_is_logged_as_a_warning(
    tmp_path: Path, files: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_end_tokens(tmp_path, **files) == ()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path} has no end-of-sequence token in generation_config.json, config.json or "
        "tokenizer_config.json; outputs end only at max_tokens"
    )


def test_a_family_may_have_a_default_end_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert eos_token_ids(Checkpoint.open(tmp_path), [4]) == (4,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert eos_token_ids(Checkpoint.open(tmp_path), [4]) == (5,)
    assert caplog.records == []


@pytest.mark.parametrize("value", ["</s>", 2.0, True, [1, "2"]])
def test_an_end_token_of_another_type_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"eos_token_id=.* must be an integer or a list of integers"):
        read_end_tokens(tmp_path, config={"eos_token_id": value})


@pytest.mark.parametrize(
    ("tokenizer_class", "stated"),
    [("Qwen2TokenizerFast", {}), ("GPT2Tokenizer", {}), ("Qwen2Tokenizer", {"eos_token": None}), ("None", {})],
)
def test_the_class_of_the_tokenizer_may_imply_an_end_token(
    tmp_path: Path, tokenizer_class: str, stated: dict[str, Any]
) -> None:
    """Some tokenizer classes, such as those of Qwen2 and GPT-2, have a default end token.

    The embedded tokenizer contains this token.
    """
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    settings = stated if tokenizer_class == "None" else {"tokenizer_class": tokenizer_class, **stated}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = eos_token_ids(Checkpoint(tmp_path, {}))
    reference = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert ids == (() if reference is None else (reference,))
    assert bool(ids) == (tokenizer_class != "None" and not stated)
