"""Tests for the error messages on a machine without CUDA."""

import pytest
import torch

from mindie_mm.device.cuda import CUDA

OLD = "The NVIDIA driver on your system is too old (found version 12020)."


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_the_error_says_that_torch_has_no_cuda_support(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"this build of torch ({torch.__version__}) has no CUDA support" in CUDA.missing()


@pytest.mark.usefixtures("no_gpu")
def test_the_error_contains_the_message_of_the_driver(monkeypatch):
    def init():
        raise RuntimeError(OLD)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert CUDA.missing().startswith(f"{OLD}; check nvidia-smi")
