"""Fixtures for the simulator's own tests. These tests need torch_npu, which the main environment must not contain."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch_npu") is None:
        reason = pytest.mark.skip(reason="torch_npu is not installed: make test-npu")
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(reason)


@pytest.fixture(scope="session")
def npu() -> torch.device:
    """Return the first simulated device of this process. Skip the test if the process has no device."""
    if "ASCEND_HOME_PATH" not in os.environ:
        pytest.skip("this process sees no CANN: python -m tests.ascend pytest")
    importlib.import_module("torch_npu")
    return torch.device("npu:0")
