"""Tests for how long OpenMP threads spin at a barrier, from the variables that libgomp prints."""

import os
import re
import subprocess
import sys

import pytest
import torch

from mindie_mm.settings.environment import SPIN_COUNT
from tools.serving import running_service

CHAT = "import mindie_mm; llm = mindie_mm.LLM(); llm.generate(['hello'], mindie_mm.SamplingParams(max_tokens=2))"


@pytest.fixture
def environment(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    return monkeypatch


def spin_counts(output: str) -> list[int]:
    return [int(count) for count in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", output)]


@pytest.mark.slow  # the service starts its processes as it does for users
def test_threads_of_a_service_sleep_soon(environment, tmp_path):
    with running_service({"spool": tmp_path / "spool"}, log := tmp_path / "log") as service:
        assert service.get("/health")
    counts = spin_counts(log.read_text())
    assert len(counts) >= 2, "at least the engine and the tokenizer must print their variables"
    assert set(counts) == {SPIN_COUNT}


@pytest.mark.slow
def test_threads_of_an_engine_sleep_soon_even_if_its_caller_has_loaded_torch(environment):
    command = [sys.executable, "-c", f"import torch; {CHAT}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    caller, *others = spin_counts(done.stderr)
    assert caller != SPIN_COUNT
    assert set(others) == {SPIN_COUNT}


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "77"), ("OMP_WAIT_POLICY", "active"), ("KMP_BLOCKTIME", "0")]
)
def test_variables_of_the_operator_are_kept(environment, name, value):
    before = dict(os.environ) | {name: value}
    script = "import os, mindie_mm; print(sorted(os.environ.items()))"
    done = subprocess.run([sys.executable, "-c", script], env=before, capture_output=True, text=True, check=True)
    assert eval(done.stdout) == sorted(before.items()), "importing the package must not change variables"


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="tests do not run in parallel")
def test_torch_uses_the_number_of_threads_of_parallel_tests():
    """PyTorch must use OMP_NUM_THREADS threads.

    With more threads, parallel tests would compete for CPUs, and `copied_workers` could not copy workers.
    """
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
