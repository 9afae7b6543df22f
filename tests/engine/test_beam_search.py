"""Tests for beam search on the embedded checkpoint, against the log-probabilities of transformers."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniProcessor

import mindie_mm
from mindie_mm import LLM, BeamSearchParams
from mindie_mm.errors import ContextLengthExceeded, InputError, MediaError
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from tests.audio_samples import tone
from tests.models.references import Reference
from tests.models.test_qwen2_5_omni import make_reference
from tools.demo import draw_shape

ROOT = Path(__file__).parents[2]
TINY = ROOT / "mindie_mm/assets/tiny"
ENDS = (777, 779)
RED = np.array(draw_shape("red", (220, 40, 40), "circle", x=0.4))
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "Hello"}],
    "media": [{"image": RED}, {"text": "What is in the image?"}, {"audio": tone(0.4)}, {"text": "And here?"}],
}

pytestmark = pytest.mark.usefixtures("copied_workers")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, WorkerConfig(engine=EngineConfig(dtype="float32"))) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference() -> Reference:
    return make_reference(TINY, processor=Qwen2_5OmniProcessor)


Found = tuple[list[int], float, str]
"""Tokens, total log-probability and finish reason of an output."""


@torch.inference_mode()
def searched(reference: Reference, items: Any, width: int, count: int, length_penalty: float) -> list[Found]:
    """Compute a beam search by its definition, with a forward pass over prompt and output for each beam and step."""
    inputs = dict(reference.inputs(items))
    prompt = inputs.pop("input_ids")
    inputs.pop("attention_mask", None)
    beams: list[Found] = [([], 0.0, "length")]
    done: list[Found] = []
    for _ in range(count):
        grown: list[Found] = []
        for tokens, total, _ in beams:
            ids = torch.cat([prompt, torch.tensor([tokens], dtype=torch.int64)], dim=1)
            logits = reference.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0, -1]
            scores = logits.float().log_softmax(-1)
            for token in scores.argsort(descending=True)[: 2 * width].tolist():
                end = token in ENDS
                found = ([*tokens, token], total + scores[token].item(), "stop" if end else "length")
                (done if end else grown).append(found)
        beams = sorted(grown, key=lambda one: -one[1])[:width]
    return sorted([*done, *beams], key=lambda one: -one[1] / len(one[0]) ** length_penalty)[:width]


@pytest.mark.parametrize(
    ("name", "width", "settings"),
    [
        ("text", 3, {}),
        ("text", 4, {"length_penalty": -1.5}),
        ("media", 3, {"length_penalty": 0.0}),
    ],
)
def test_the_outputs_equal_those_computed_with_transformers(
    llm: LLM, reference: Reference, name: str, width: int, settings: dict[str, Any]
) -> None:
    items = PROMPTS[name]
    expected = searched(reference, items, width, 8, settings.get("length_penalty", 1.0))
    (output,) = llm.beam_search([items], BeamSearchParams(width, 8, **settings), chat_template=False)
    assert [(one.tokens, one.finish_reason) for one in output.sequences] == [(ids, why) for ids, _, why in expected]
    assert name == "text" or "stop" in {why for _, _, why in expected}, "outputs that end are compared"
    assert [one.cum_logprob for one in output.sequences] == pytest.approx([total for _, total, _ in expected], abs=1e-3)
    for one in output.sequences:
        assert [p.token_id for p in one.logprobs] == one.tokens
        assert sum(p.logprob for p in one.logprobs) == pytest.approx(one.cum_logprob)
        assert all(len(p.top) == 2 * width for p in one.logprobs)


@torch.inference_mode()
def test_without_an_end_the_outputs_equal_transformers_beam_search(llm: LLM, reference: Reference) -> None:
    inputs = reference.inputs(PROMPTS["media"])
    settings = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 10, "do_sample": False}
    found = reference.model.generate(**inputs, **settings, eos_token_id=None)
    expected = found[:, inputs["input_ids"].shape[1] :].tolist()
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    (output,) = llm.beam_search([PROMPTS["media"]], params, chat_template=False)
    assert [one.tokens for one in output.sequences] == expected


def test_the_example_of_the_page_runs(llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(mindie_mm, "LLM", lambda: contextlib.nullcontext(llm))  # loading another one takes seconds
    page = (ROOT / "docs/python.md").read_text()
    (example,) = re.findall(r"^## Beam search\n.*?^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/python.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[3].endswith(" red circle")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"beam_width": 11}, r"beam_width=11 must be in \[1, 10\] for a beam search"),
        ({"beam_width": 0}, "beam_width=0"),
        ({"beam_width": 10**100}, "beam_width=<integer of 333 bits>"),
        ({"beam_width": "2"}, "beam_width is of type str"),
        ({"beam_width": True}, "beam_width=True"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"length_penalty": None}, "length_penalty is of type NoneType"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": "8"}, "max_tokens is of type str"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"temperature": -1}, "temperature=-1"),
    ],
)
def test_settings_out_of_range_are_named(llm: LLM, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        llm.beam_search(["Hello"], BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **settings}))


def test_a_prompt_that_fails_is_reported_after_the_others(llm: LLM) -> None:
    with pytest.raises(MediaError):
        llm.beam_search(["Hello", [{"image": b"no image"}]], BeamSearchParams(2, 2))
    with pytest.raises(ContextLengthExceeded):
        llm.beam_search(["Hello"], BeamSearchParams(2, 10**6))
    with pytest.raises(InputError, match="list"):
        llm.beam_search(5, BeamSearchParams(2, 2))
    assert llm.beam_search([], BeamSearchParams(2, 2)) == []
