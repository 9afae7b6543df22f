"""Tests for the example with two processes, with both wire formats."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from examples import two_processes
from mindie_mm.processes import ipc
from tests.warm import SUBPROCESS

own_generate = two_processes.generate


def generate(model: str | None, connection: Connection) -> None:
    """Run process B, but start its engine as a copy, which saves the time to import modules."""
    ipc.subprocess = SUBPROCESS  # type: ignore[assignment]
    own_generate(model, connection)


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_processes, "generate", generate)


def test_process_b_answers_about_the_media_that_process_a_has_tokenized() -> None:
    assert two_processes.main() == ["red circle", "right", "high"]


def test_process_b_reads_the_wire_of_mindie(random_checkpoint: Path) -> None:
    texts = two_processes.main(str(random_checkpoint), "mindie")
    assert len(texts) == 2
    assert all(texts)
