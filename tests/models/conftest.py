"""Fixtures for the tests in this folder."""

import shutil

import pytest
from transformers import PreTrainedConfig

from mindie_mm.shm import request_directory
from tests.models.mindie_contract import StandIn

# transformers formats each configuration for its log, even if the log is off, which takes milliseconds each time.
PreTrainedConfig.__repr__ = object.__repr__

REPRESENTATIVE = {"TestQwen2VL", "TestQwen2Audio", "TestGemma3", "TestInternVL", "TestMolmo", "TestFlorence2"}
"""Tests for six families that differ in media, positions, attention masks, code of their own, and decoders."""


LAYOUT = {
    "test_ids_and_arrays_equal_the_references",
    "test_logits_equal_the_references",
    "test_generated_tokens_equal_the_references",
    "test_logits_under_other_settings_equal_the_references",
}
"""Contract tests that depend on how a checkpoint is stored. The others pass if they pass in the usual layout."""


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow that would show the same for several families, or for two layouts of a family."""
    for item in items:
        if item.get_closest_marker("representative") and item.cls.__name__ not in REPRESENTATIVE:
            item.add_marker(pytest.mark.slow)
        in_contract = item.function.__module__.endswith("contract")
        if in_contract and item.cls.__name__.endswith("Original") and item.originalname not in LAYOUT:
            item.add_marker(pytest.mark.slow)


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
