"""Fixtures for the tests for the tokenizer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mindie_mm.shm import Arena
from mindie_mm.tokenize import Tokenizer
from tools.random_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory) -> Path:
    """Return the path of a small checkpoint with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(16 * 2**20) as arena:
        yield arena


@pytest.fixture
def tokenizer(checkpoint_path, arena) -> Iterator[Tokenizer]:
    """Yield a tokenizer with an arena of 16 MiB."""
    with Tokenizer.from_pretrained(checkpoint_path, arena=arena) as tokenizer:
        yield tokenizer
