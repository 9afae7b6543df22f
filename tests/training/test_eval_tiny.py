"""Tests that the embedded checkpoint answers as docs/embedded-checkpoint.md says.

`python -m training.eval_tiny` asks more questions.
"""

import math

import pytest
from safetensors import safe_open

from mindie_mm import LLM, SamplingParams
from training.eval_tiny import ROOT, SEED, held_out, judge
from training.samples import TASKS
from training.speech import DIGITS, HELD_OUT_VOICES, recorded

TINY = ROOT / "mindie_mm" / "assets" / "tiny"

pytestmark = pytest.mark.usefixtures("copied_workers")


@pytest.mark.slow
def test_the_checkpoint_answers_unseen_scenes_and_sounds():
    samples = [
        one
        for one in held_out(SEED + 1, 120)
        if not any(sound.speaker for sound in one.sounds)  # espeak-ng, which generates speech, may not be installed
    ]
    found = judge(TINY, samples, verbose=True)
    right, asked = (sum(column) for column in zip(*found.values(), strict=True))
    assert asked == len(samples) >= 100
    assert right / asked >= 0.9, found


@pytest.mark.parametrize(
    "voice", [HELD_OUT_VOICES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in HELD_OUT_VOICES[1:])]
)
@pytest.mark.slow
def test_the_checkpoint_understands_digits_of_unheard_voices(voice: str) -> None:
    prompts = [[{"audio": str(recorded(word, voice))}, {"text": "Which digit is spoken?"}] for word in DIGITS]
    with LLM(TINY) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    heard = [output.text for output in outputs]
    assert sum(a == b for a, b in zip(heard, DIGITS, strict=True)) >= 8, heard


def test_every_task_is_judged() -> None:
    assert {one.task for one in held_out(SEED, len(TASKS))} == set(TASKS)


def test_the_checkpoint_is_small():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 10 * 10**6
    with safe_open(TINY / "model.safetensors", "pt") as weights:
        count = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118 - not a dict
    assert 2e6 <= count <= 4e6
