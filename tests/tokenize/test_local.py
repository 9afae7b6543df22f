"""The tokenizer on a thread of a script's process."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import mindie_mm
from mindie_mm.config import WorkerConfig
from mindie_mm.shm import request_directory
from mindie_mm.tokenize.local import LocalTokenizer
from mindie_mm.tokenize.messages import TokenizeRequest
from tests.decode.conftest import busy, until
from tests.media_samples import encoded, photograph

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


async def test_with_decoders_a_cancelled_request_ends_and_delays_nobody(tmp_path: Path) -> None:
    tokenizer = await LocalTokenizer.start(TINY, WorkerConfig(arena_bytes=2**20, decoders=1))
    decoders = tokenizer._tokenizer._decoders
    assert decoders is not None
    try:
        (pid,) = decoders.pids
        os.kill(pid, signal.SIGSTOP)
        with request_directory(tmp_path) as directory:
            items = [{"image": encoded(photograph("chelsea.png", (60, 40)))}]
            picture = TokenizeRequest(items=items, path_file=str(directory.path_file))
            given_up = asyncio.create_task(tokenizer.tokenize(picture))
            await until(lambda: busy(decoders))
            assert len(await tokenizer.tokenize(TokenizeRequest(text="Hello!")))
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            await until(lambda: not psutil.pid_exists(pid))
            assert (await tokenizer.tokenize(picture)).spans
    finally:
        await tokenizer.close()
