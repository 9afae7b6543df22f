"""Tests for the tokenizer in a thread of the caller's process."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import mindie_mm
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm import release, request_directory
from mindie_mm.tokenize.local import LocalTokenizer
from mindie_mm.tokenize.requests import request_of_items

TINY = Path(mindie_mm.__file__).parent / "assets/tiny"
KILLED = """
import os, signal, sys
from pathlib import Path
from mindie_mm.shm import request_directory

with request_directory(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def start_and_close() -> None:
    tokenizer = await LocalTokenizer.start(TINY, WorkerConfig(arena_bytes=2**20))
    await tokenizer.close()


async def test_prompts_tokenized_together_equal_prompts_tokenized_alone(tmp_path: Path) -> None:
    image, text = {"image": Image.new("RGB", (60, 90))}, {"text": "What?"}
    given = [[text], [image, text, image], [image]]
    requests = [request_of_items(items, path_file=str(tmp_path / "shm_name.txt")) for items in given]
    tokenizer = await LocalTokenizer.start(TINY, WorkerConfig(arena_bytes=2**20))
    try:
        together = await tokenizer.tokenize_together(requests)
        assert release(tmp_path / "shm_name.txt") == 3
        for prompt, request in zip(together, requests, strict=True):
            alone = await tokenizer.tokenize(request)
            assert prompt.plain_ids.tolist() == alone.plain_ids.tolist()
            assert prompt.spans == alone.spans
    finally:
        await tokenizer.close()


def test_starting_removes_the_spool_files_of_killed_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDIE_MM_SPOOL", str(tmp_path))
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with request_directory(tmp_path) as living:
        asyncio.run(start_and_close())
        assert not left.exists()
        assert living.path_file.exists()
