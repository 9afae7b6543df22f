"""Tests for an application that PyInstaller has frozen, in which sys.executable is the application itself."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

STARTS = """
import asyncio, contextlib, io, json, sys

sys.frozen = True
sys.executable = sys.argv[1] or sys.executable
from mindie_mm import LLM, cli
from mindie_mm.errors import MindieMMError
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.ipc import Child
from mindie_mm.processes.ray_cluster import join
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.tokenize import AsyncTokenizer

async def fork_server():
    async with ForkClient("tests.starting_worker") as forks:
        await (await forks.start("tests.starting_worker", "begins")).close()

async def tokenizer():
    async with await AsyncTokenizer.start(EMBEDDED, WorkerConfig()):
        pass

async def worker():
    await (await Child.start("tests.starting_worker", "begins")).close()

def command(*arguments):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        cli.main(arguments)
    raise MindieMMError(errors.getvalue())

starts = {
    "llm": lambda: LLM(None).close(),
    "worker": lambda: asyncio.run(worker()),
    "fork server": lambda: asyncio.run(fork_server()),
    "tokenizer": lambda: asyncio.run(tokenizer()),
    "ask": lambda: command("ask", "Hello"),
    "ray": lambda: join("local", "ray"),
    "tokenize": lambda: command("tokenize", sys.argv[2], "--output", sys.argv[3]),
}
outcomes = {}
for name in sys.argv[4:] or starts:
    try:
        starts[name]()
        outcomes[name] = "started"
    except MindieMMError as error:
        outcomes[name] = str(error)
print(json.dumps(outcomes))
"""


def outcomes(tmp_path: Path, executable: str, *names: str) -> dict[str, str]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Hello"}\n')
    command = [sys.executable, "-c", STARTS, executable, rows, tmp_path / "out", *names]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_frozen_application_does_not_start_itself(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "")
    assert len(found) == 7
    if find_spec("ray") is None:
        del found["ray"]
    for name, outcome in found.items():
        assert f"sys.executable ({sys.executable}) is a frozen application" in outcome, name


def test_a_frozen_application_may_name_another_interpreter(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    assert outcomes(tmp_path, str(other), "worker") == {"worker": "started"}
