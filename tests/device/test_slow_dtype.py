"""Tests of the warnings about weights in a dtype that the processor has no instructions for.

oneDNN selects the instructions. The tests exclude some instructions with an environment variable, which oneDNN reads
when it is loaded.
"""

import os
import subprocess
import sys

import pytest
import torch

from mindie_mm.device import open_device, slow_dtype

SCRIPT = """
import json, sys
from mindie_mm.device import slow_dtype
from mindie_mm.doctor import _dtype
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
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    warning = "the cpu has no bfloat16 instructions; inference is several times slower than in float32"
    assert ended.stdout.splitlines() == [
        f"['warning {warning}; --dtype float32']",
        "[]",
        f"{warning}. Use --dtype float32, or 32 bits for the part (--vision-bits, --projector-bits)",
    ]


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported(), reason="no such processor"
)
def test_there_is_no_warning_if_the_processor_has_instructions():
    assert slow_dtype(torch.nn.Linear(2, 2, dtype=torch.bfloat16)) is None


def test_there_is_no_warning_about_32_bits():
    module = torch.nn.Linear(2, 2)
    assert slow_dtype(module) is None
    assert open_device("cpu").multiplies(torch.float32)
