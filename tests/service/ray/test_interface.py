"""Runs the tests for the HTTP interface against a service on Ray Serve with two workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent
MODULES = ("chat_completions", "completions", "generate", "http_errors", "infer", "tokens")
OF_ONE_WORKER = "computed_once"
"""Tests that read the metrics of a single worker."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_interface_is_the_same_on_ray() -> None:
    pytest.importorskip("ray.serve", exc_type=ImportError)
    options = ["--front", "ray", "-n", "0", "--timeout", "1500", "-k", f"not {OF_ONE_WORKER}"]
    files = [str(FOLDER / f"test_{name}.py") for name in MODULES]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:]
