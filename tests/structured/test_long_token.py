"""Tests for a checkpoint with an added token of 2,000 characters, for which llguidance panics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from mindie_mm.errors import OperationalError, panics_as
from mindie_mm.nn.checkpoint.directory import Checkpoint
from tests.warm import running_service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(Checkpoint.open(None).path, tmp_path_factory.mktemp("long") / "long"))
    described = json.loads((folder / "tokenizer.json").read_text())
    added = {"content": "=" * 2000, "special": False, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    described["added_tokens"].append({"id": 787, **added})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


def test_a_panic_becomes_the_given_error(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with pytest.raises(OperationalError, match="the vocabulary cannot be read: assertion failed") as raised:  # noqa: SIM117
        with panics_as(OperationalError, "the vocabulary cannot be read"):
            LLTokenizer(tokenizer.to_str())
    assert not isinstance(raised.value.__cause__, Exception)
    with pytest.raises(KeyboardInterrupt), panics_as(OperationalError, ""):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_the_checkpoint_is_served_without_structured_outputs(folder: Path, tmp_path: Path) -> None:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 512,
        "arena_bytes": 2**22,
        "kv_cache_bytes": 2**24,
    }
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with running_service(settings, tmp_path / "log", folder) as running:

        def answer(**fields: Any) -> tuple[int, str]:
            reply = httpx2.post(f"{running.url}/v1/chat/completions", json={**chat, **fields}, timeout=300)
            return reply.status_code, reply.text

        assert answer()[0] == 200, answer()
        for wanted in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"regex": "a+"}},
            {"tools": [tool], "tool_choice": "required"},
        ):
            status, text = answer(**wanted)
            assert status == 400, text
            assert "structured outputs cannot be used with this checkpoint's tokenizer" in text
        assert answer()[0] == 200, answer()
