"""Tests that an interrupt ends a command with the right exit status, even while the command imports modules."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindie_mm.media.source import FETCH_TIMEOUT_S
from tests import warm
from tests.cli.shell import BIN, TIMEOUT_S

RUN = ("tokenize", "rows.jsonl", "--output", "run")
CASES = [
    (RUN, "click.globals"),
    (RUN, "mindie_mm.cli.settings"),
    (RUN, "numpy"),
    (("ask", "What?"), "click.globals"),
    pytest.param(("ask", "What?"), "mindie_mm.worker.worker", marks=pytest.mark.slow),
    (("generate", "--tokenized", "run", "--output", "answers"), "pyarrow"),
    (("inspect", "run"), "numpy"),
    pytest.param(("models",), "mindie_mm.models", marks=pytest.mark.slow),
    (("doctor",), "torch.types"),
    (("shm", "list"), "mindie_mm.shm.format.words"),
    (("--help",), "click.globals"),
]
"""Pairs of a command and a module. The command is interrupted after it has imported the module."""


def interrupted(arguments: tuple[str, ...], module: str, number: int, folder: Path) -> tuple[int, str]:
    """Run a command, and send a signal after it has imported `module`. Return its status and its further output."""
    command = [sys.executable, "-X", "importtime", str(BIN), *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.rpartition("|")[2].strip() == module for line in process.stderr), (
            "the command must import the module"
        )
        process.send_signal(number)
        printed = [line for line in process.stderr if not line.startswith("import time:")]
        return process.wait(TIMEOUT_S), "".join(printed)


@pytest.mark.parametrize(
    ("arguments", "module"), CASES, ids=lambda given: given if isinstance(given, str) else given[0]
)
def test_a_command_can_be_interrupted_while_it_imports(arguments: tuple[str, ...], module: str, tmp_path: Path) -> None:
    assert interrupted(arguments, module, signal.SIGINT, tmp_path) == (130, "Interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["click.globals", "mindie_mm.settings.sources"])
def test_serve_ends_with_status_0_when_interrupted_while_it_imports(module: str, number: int, tmp_path: Path) -> None:
    status, printed = interrupted(("serve", "--port", "0"), module, number, tmp_path)
    assert (status, "Traceback" in printed) == (0, False)


def test_a_command_can_be_interrupted_while_it_works(random_checkpoint: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "never.png"
    os.mkfifo(fifo)
    with (tmp_path / "out").open("w+") as out:
        command = [BIN, "ask", "What?", "--model", random_checkpoint, "--image", fifo]
        process = warm.Popen(list(map(str, command)), stdout=out, stderr=out)
        try:
            with fifo.open("wb"):  # returns when the command opens the image
                process.send_signal(signal.SIGINT)
                assert process.wait(FETCH_TIMEOUT_S / 2) == 130  # less than the timeout for reading the image
        finally:
            process.kill()
        assert (tmp_path / "out").read_text().endswith("Interrupted\n")
