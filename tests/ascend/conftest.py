"""The simulator's own tests need torch_npu, which the main environment must not have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch_npu") is None:
        reason = pytest.mark.skip(reason="torch_npu is not installed: make test-npu")
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(reason)
