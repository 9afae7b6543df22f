"""Fixtures of the tests of model families."""

import shutil

import pytest

from mindie_mm.shm import request_directory


@pytest.fixture
def copy(random_checkpoint, tmp_path):
    """Return a copy of the random checkpoint, which a test may damage."""
    return shutil.copytree(random_checkpoint, tmp_path / "broken")


@pytest.fixture
def path_file(tmp_path):
    """Yield a path file. After the test, release its blocks."""
    with request_directory(tmp_path) as directory:
        yield directory.path_file
