"""Fixtures of the tests of model families."""

import shutil

import pytest

from mindie_mm.shm import request_directory
from tests.models.mindie_contract import StandIn


@pytest.fixture
def copy(random_checkpoint, tmp_path):
    """Return a copy of the random checkpoint, which a test may damage."""
    return shutil.copytree(random_checkpoint, tmp_path / "broken")


@pytest.fixture
def path_file(tmp_path):
    """Yield a path file. After the test, release its blocks."""
    with request_directory(tmp_path) as directory:
        yield directory.path_file


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory):
    """Yield a process that stands in for MindIE."""
    process = StandIn(tmp_path_factory.mktemp("stand-in"))
    yield process
    process.close()
