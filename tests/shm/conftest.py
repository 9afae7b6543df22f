"""Processes and fixtures for the tests for shared memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mindie_mm.shm import Arena

PREAMBLE = """
import os, sys, time
from pathlib import Path
import numpy as np
from mindie_mm.errors import *
from mindie_mm.shm import *
def say(*values): print(*values, flush=True)
def hear(): return sys.stdin.readline().strip()
"""


class Process:
    """A Python process that runs a script, prints lines for the test and reads lines from the test."""

    def __init__(self, script: str, *args: object) -> None:
        command = [sys.executable, "-c", PREAMBLE + script, *map(str, args)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> str:
        return self.popen.stdout.readline().strip()

    def say(self, *values: object) -> None:
        print(*values, file=self.popen.stdin, flush=True)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        self.kill()
        self.popen.stdin.close()
        self.popen.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(script: str, *args: object) -> Process:
        processes.append(Process(script, *args))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(1 << 20) as arena:
        yield arena


@pytest.fixture
def path_file(tmp_path: Path) -> Path:
    return tmp_path / "shm_name.txt"
