"""The tokenizer on a thread of a script's process."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mindie_mm
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm import request_directory
from mindie_mm.tokenize.local import LocalTokenizer

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


def test_it_removes_spool_files_of_killed_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDIE_MM_SPOOL", str(tmp_path))
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with request_directory(tmp_path) as living:
        asyncio.run(start_and_close())
        assert not left.exists()
        assert living.path_file.exists()
