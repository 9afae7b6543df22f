"""Tests for a run's settings and the digests of its checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindie_mm.batch.same_run import model_digest, weights_digest
from mindie_mm.batch.settings import Settings
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import EMBEDDED, Checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(shutil.copytree(EMBEDDED, tmp_path / "checkpoint"))


def test_folders_and_broken_links_do_not_count_for_a_checkpoints_digest(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "logs.json").mkdir()
    (checkpoint.path / "gone.txt").symlink_to("nowhere")
    (checkpoint.path / "round.json").symlink_to("round.json")
    assert model_digest(checkpoint) == model_digest(Checkpoint.open())


def test_the_error_names_a_file_that_cannot_be_read(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "bad.json").symlink_to("/proc/self/mem")
    with pytest.raises(UnsupportedCheckpoint, match=r"bad\.json cannot be read: Input/output error"):
        model_digest(checkpoint)


@pytest.mark.parametrize("name", ["model", "stdin_folder", "inputs"])
def test_a_path_that_is_not_utf_8_is_refused(name: str) -> None:
    path = os.fsdecode(b"/caf\xe9")
    given = {"model": "", "inputs": ("-",)} | {name: (path,) if name == "inputs" else path}
    with pytest.raises(InputError, match=rf"{name} has '/caf\\udce9', which is not UTF-8"):
        Settings(**given)


def test_truncate_needs_max_tokens() -> None:
    with pytest.raises(InputError, match="truncate requires max_tokens"):
        Settings(model="", inputs=("-",), truncate=True)


def test_the_weights_digest_covers_the_content(checkpoint: Checkpoint) -> None:
    assert weights_digest(checkpoint) == weights_digest(Checkpoint.open())
    weights = checkpoint.path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert weights_digest(checkpoint) != weights_digest(Checkpoint.open())
    assert model_digest(checkpoint) == model_digest(Checkpoint.open())


def test_the_error_without_pyarrow_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from mindie_mm.cli import main; main()"
    command = [sys.executable, "-c", code, "tokenize", "rows.jsonl", "--output", "run"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "Error: batches need pyarrow, which is not installed: pip install 'mindie_mm[batch]'"
    )
