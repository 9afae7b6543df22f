"""Tests that an engine continues an output after the tokens that another engine has drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add, Origin, Progress, TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig
from mindie_mm.structured.grammar import Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from tests.models.contract import noise

PROMPT = np.arange(10, 60, dtype=np.int64)
LENGTH = 40
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH, ignore_eos=True, logprobs=3)
SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "minLength": 200}}, "required": ["text"]}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "filtered": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "min tokens": {"ignore_eos": False, "min_tokens": 30, "logit_bias": {777: 4.0, 779: 4.0}},
    "bad tokens": {"temperature": 0.0, "bad_token_ids": ((3, 4), (20,))},
    "stop tokens": {"stop_token_ids": tuple(range(0, 792, 16)), "min_tokens": 12},
    "structure": {"structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA)), "ignore_eos": False},
    "named logprobs": {"logprob_token_ids": (5, 9)},
}


@pytest.fixture(scope="module")
def model(device: str) -> Any:
    return load_model(None, device, "float32")


@pytest.fixture(scope="module")
def grammars(model: Any) -> Grammars:
    return Grammars(load_tokenizer(Checkpoint.open(None)), model.spec.eos_token_ids)


@pytest.fixture
def engine(model: Any, grammars: Grammars) -> Engine:
    engine = Engine(model, EngineConfig(kv_block_size=4), 2**24)
    engine.grammars, engine.weights = grammars, b"weights"
    return engine


def run(engine: Engine, ids: np.ndarray[Any, Any], params: SamplingParams, **more: Any) -> list[Progress]:
    """Return the progress of a request that runs alone."""
    failure = engine.add(Add("a", ids.tobytes(), params, **more))
    steps = [failure] if failure else []
    while engine.has_work():
        steps += engine.step().progress
    return steps


def tokens(steps: list[Progress]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def numbers(steps: list[Progress]) -> list[float]:
    found: list[TokenLogprob] = [one for step in steps for one in step.logprobs or ()]
    return [number for one in found for number in (one.logprob, *(value for _, value in sorted(one.top)))]


@pytest.mark.parametrize("case", CASES)
def test_a_continued_output_equals_an_undisturbed_output(engine: Engine, case: str) -> None:
    params = msgspec.structs.replace(DRAWN, **CASES[case])
    steps = run(engine, PROMPT, params)
    whole, origin = tokens(steps), steps[0].origin
    assert len(whole) > 12
    assert [step.origin for step in steps[1:]] == [None] * (len(steps) - 1)
    for count in (1, 2, 9, len(whole) // 2, len(whole) - 1):
        rest = run(engine, PROMPT, params, drawn_ids=whole[:count], origin=origin)
        assert tokens(rest) == whole[count:]
        assert numbers(rest) == pytest.approx(numbers(steps[count:]), abs=1e-4)
        assert (rest[-1].finish_reason, rest[-1].stop_token_id) == (steps[-1].finish_reason, steps[-1].stop_token_id)
        assert {step.cached_tokens for step in rest} == {None}, "the first attempt has sent the number"


def test_random_numbers_are_skipped_as_if_they_had_been_drawn() -> None:
    for count in (1, 7, 8, 100, 1001):
        skipped, drawn = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        torch.rand(count, 2, generator=skipped)
        for _ in range(count):
            torch.rand(2, generator=drawn)
        assert torch.equal(skipped.get_state(), drawn.get_state())


def test_a_preempted_output_may_be_a_continued_output(model: Any, grammars: Grammars) -> None:
    params = msgspec.structs.replace(DRAWN, logprobs=None)
    engine = Engine(model, EngineConfig(kv_block_size=4, kv_cache_bytes=34 * 4 * model.spec.kv_token_bytes))
    prompts = [PROMPT, PROMPT + 1]
    alone = [tokens(run(engine, ids, params)) for ids in prompts]
    found: dict[str, list[int]] = {"0": alone[0][:5], "1": alone[1][:9]}
    for name, ids in zip(found, prompts, strict=True):
        assert engine.add(Add(name, ids.tobytes(), params, drawn_ids=found[name])) is None
    while engine.has_work():
        for step in engine.step().progress:
            found[step.request_id] = [*found[step.request_id], *step.token_ids]
    assert engine.stats.preemptions
    assert [*found.values()] == alone


@pytest.mark.usefixtures("unmapped")
def test_an_output_about_media_continues_only_with_the_same_media(engine: Engine, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with Tokenizer.from_pretrained() as tokenizer:

        def ids(seed: int, text: str = "What is in the image?") -> np.ndarray[Any, Any]:
            items = [{"image": Image.fromarray(noise(60, 90, seed))}, {"text": text}]
            return tokenizer.tokenize(items, tmp_path / "path").numpy()

        steps = run(engine, ids(1), params)
        whole = tokens(steps)
        (origin,) = {step.origin for step in steps if step.origin}
        continued = {"drawn_ids": whole[:4], "origin": origin}
        assert tokens(run(engine, ids(1), params, **continued)) == whole[4:], "other blocks may contain the media"
        for other in (ids(2), ids(1, "Where is it?")):
            (failed,) = run(engine, other, params, **continued)
            assert failed.error.name == "OperationalError"
            assert "have changed since its output began" in failed.error.message
        (failed,) = run(engine, ids(2), params, origin=origin)
        assert failed.error.name == "OperationalError", "no token has been drawn, but other choices may have begun"


def test_an_output_that_has_begun_continues_only_with_the_same_weights(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    steps = run(engine, PROMPT, params)
    origin = Origin(steps[0].origin.prompt, b"other")
    (failed,) = run(engine, PROMPT, params, drawn_ids=tokens(steps)[:3], origin=origin)
    assert failed.error.name == "WeightsChanged"
    assert tokens(run(engine, PROMPT, params, origin=origin)) == tokens(steps), "no token has been drawn"


def test_an_output_longer_than_the_engines_context_fails(model: Any) -> None:
    engine = Engine(model, EngineConfig(max_model_len=64), 2**24)
    params = SamplingParams(temperature=0, ignore_eos=True)
    assert len(tokens(run(engine, PROMPT, params, drawn_ids=[9] * 13))) == 1
    (failed,) = run(engine, PROMPT, params, drawn_ids=[9] * 14)
    assert failed.error.name == "ContextLengthExceeded"
    assert "50 prompt tokens and 14 output tokens" in failed.error.message


def test_the_state_of_the_weights_changes_with_each_of_their_files(tmp_path: Path) -> None:
    for name in ("config.json", "a.safetensors", "b.safetensors"):
        (tmp_path / name).write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    states = [checkpoint.weights_state()]
    (tmp_path / "notes.txt").write_text("other")
    assert checkpoint.weights_state() == states[0]
    (tmp_path / "copy").write_text("{}")
    for change in (
        lambda: (tmp_path / "copy").replace(tmp_path / "a.safetensors"),
        lambda: (tmp_path / "b.safetensors").write_text("{ }"),
        (tmp_path / "b.safetensors").unlink,
    ):
        change()
        states.append(checkpoint.weights_state())
    assert len({*states}) == 4
