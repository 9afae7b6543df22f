"""Tests for the data type that the CPU chooses for a checkpoint by default."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from mindie_mm import LLM, SamplingParams
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from tests.conftest import KERNELS
from tools.demo import draw_shape
from tools.random_checkpoint import write_checkpoint

COLOURS = {"red": (220, 40, 40), "blue": (40, 80, 220), "green": (40, 160, 60), "orange": (255, 140, 0)}
SHAPES = "circle", "square", "star"
X86 = platform.machine() == "x86_64"


@pytest.mark.parametrize("instructions", ["no", "yes"])
def test_a_checkpoint_in_bfloat16_keeps_it_where_the_processor_computes_in_it(
    instructions: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINDIE_MM_KERNELS", f"{KERNELS},bfloat16={instructions}")
    dtype = torch.bfloat16 if instructions == "yes" and X86 else torch.float32
    assert load_model(None, device="cpu").spec.dtype == dtype, "the embedded checkpoint"
    assert load_model(write_checkpoint(tmp_path / "tiny"), device="cpu").spec.dtype == torch.float32


@pytest.mark.parametrize("wide", ["no", "yes"], ids=["in bfloat16", "in float32 if this is faster"])
def test_greedy_answers_of_the_embedded_checkpoint_are_those_in_float32(
    wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDIE_MM_KERNELS", f"{KERNELS},bfloat16=yes,wide={wide}")
    images = [draw_shape(colour, rgb, shape, x=0.4) for colour, rgb in COLOURS.items() for shape in SHAPES]
    prompts = [[{"image": image}, {"text": "What is in the image?"}] for image in images]
    answers = []
    for dtype in ("float32", "bfloat16"):
        with LLM(config=WorkerConfig(engine=EngineConfig(device="cpu", dtype=dtype))) as llm:
            answers.append([output.text for output in llm.generate(prompts, SamplingParams(temperature=0))])
    assert answers[0] == answers[1]
    assert answers[0][0] == "red circle"
