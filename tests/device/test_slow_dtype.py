"""Tests for the warnings about weights in a dtype that the processor has no instructions for."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from mindie_mm.device import open_device, slow_dtype

SCRIPT = """
import json, sys
from mindie_mm.device import slow_dtype
from mindie_mm.doctor.machine import _dtype
from mindie_mm.engine.requests.engine_messages import Start
from mindie_mm.engine.process.engine_process import load_engine
from mindie_mm.engine.ranks import ALONE
from mindie_mm.settings.config import EngineConfig
import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout, level="WARNING")
engine = EngineConfig(device="cpu", dtype="bfloat16")
print([f"{one.status} {one.found}; {one.advice}" for one in _dtype("cpu", "bfloat16")])
print(list(_dtype("cpu", "auto")))
load_engine(Start(None, engine), ALONE)
"""


@pytest.mark.slow
def test_an_engine_and_doctor_warn_about_a_slow_dtype():
    environment = os.environ | {"MINDIE_MM_KERNELS": "bfloat16=no,onednn=no,blocks=no"}
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    warning = "the cpu has no bfloat16 instructions; inference is several times slower than in float32"
    assert ended.stdout.splitlines() == [
        f"['warning {warning}; --dtype float32']",
        "[]",
        f"{warning}. Use --dtype float32, or 32 bits for the part (--vision-bits, --projector-bits)",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_warning_depends_on_the_instructions_of_the_processor(dtype, monkeypatch):
    module = torch.nn.Linear(2, 2, dtype=dtype)
    monkeypatch.setenv("MINDIE_MM_KERNELS", "bfloat16=yes")
    assert slow_dtype(module) is None
    monkeypatch.setenv("MINDIE_MM_KERNELS", "bfloat16=no")
    assert "several times slower" in slow_dtype(module)
    monkeypatch.delenv("MINDIE_MM_KERNELS")
    assert open_device("cpu").multiplies(dtype) in (True, False)


def test_older_x86_processors_have_no_bfloat16_instructions():
    """OneDNN reads the variable when it is loaded. On aarch64, the variable has no effect."""
    code = (
        "import torch; from mindie_mm.device import open_device; print(open_device('cpu').multiplies(torch.bfloat16))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MINDIE_MM_KERNELS"}
    command, environment = [sys.executable, "-c", code], environment | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert platform.machine() != "x86_64" or ended.stdout == "False\n"


def test_there_is_no_warning_about_32_bits():
    module = torch.nn.Linear(2, 2)
    assert slow_dtype(module) is None
    assert open_device("cpu").multiplies(torch.float32)
