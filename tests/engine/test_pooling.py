"""Tests for pooled hidden states against those of transformers, on random weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mindie_mm.device.cpu import CPU
from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Abort, Add, Progress
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.models import load_model
from mindie_mm.nn.model import Model
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import noise, run
from tests.models.test_qwen2_vl import PROMPTS, Qwen2VLReference

MODES = ("last", "mean", "cls")
TOLERANCE = 1e-4
PREFIXED = [
    {"image": noise(90, 140)},
    {"text": "A long question about this picture, which many prompts share. What?"},
]


@pytest.fixture(autouse=True, params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU use asynchronous scheduling, too. The engine then launches a step before it reads the results."""
    monkeypatch.setattr(CPU, "is_asynchronous", request.param)


@pytest.fixture(scope="module")
def model(random_checkpoint: Path, device: str) -> Model:
    return load_model(random_checkpoint, device, "float32")


@pytest.fixture(scope="module")
def states(random_checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the hidden states of transformers' last layer after the final norm, [T, hidden], for each prompt."""
    reference = Qwen2VLReference(random_checkpoint)
    with torch.inference_mode():
        return {
            name: reference.model.model(**reference.inputs(items)).last_hidden_state[0]
            for name, items in {**PROMPTS, "prefixed": PREFIXED}.items()
        }


@pytest.fixture
def prompts(random_checkpoint: Path, tmp_path: Path) -> Iterator[dict[str, torch.Tensor]]:
    path_file = tmp_path / "shm_name.txt"
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        yield {name: tokenizer.tokenize(items, path_file) for name, items in {**PROMPTS, "prefixed": PREFIXED}.items()}
        release(path_file)


def pooled_by_formula(states: torch.Tensor, mode: str) -> torch.Tensor:
    """Pool as sentence-transformers' module Pooling does for one sequence."""
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[mode]


def pooled(engine: Engine, prompts: Sequence[torch.Tensor], mode: Any, **settings: Any) -> list[Progress]:
    """Return the last progress of each prompt. All prompts are pooled at the same time."""
    params = SamplingParams(max_tokens=0, pooling=mode, **settings)
    for i, ids in enumerate(prompts):
        assert engine.add(Add(str(i), ids.numpy().tobytes(), params)) is None
    found = {}
    while engine.has_work():
        found |= {one.request_id: one for one in engine.step().progress if one.finish_reason or one.error}
    return [found[str(i)] for i in range(len(prompts))]


def vector(progress: Progress) -> torch.Tensor:
    assert progress.error is None, progress.error
    assert progress.token_ids == []
    return torch.from_numpy(np.frombuffer(progress.pooled, np.float32).copy())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 7, "max_tower_tokens": 8}],
    ids=["one step", "small chunks"],
)
def test_pooled_states_equal_those_of_transformers(mode, settings, model, states, prompts):
    engine = Engine(model, EngineConfig(**settings))
    found = pooled(engine, list(prompts.values()), mode)
    for name, one in zip(prompts, found, strict=True):
        assert (vector(one) - pooled_by_formula(states[name], mode)).abs().max() <= TOLERANCE, name
    assert engine.stats.kv_cache_usage == 0


@pytest.mark.parametrize("mode", MODES)
def test_preemption_does_not_change_the_result(mode, model, states, prompts):
    """A request that is preempted in the middle of its prompt computes some states again, but pools each once."""
    text, long = prompts["text"], prompts["mixed"]
    num_blocks = -(-len(text) // 4) + -(-len(long) // 4) + 1
    cache_bytes = num_blocks * 4 * model.spec.kv_token_bytes
    config = EngineConfig(
        kv_block_size=4, kv_cache_bytes=cache_bytes, max_num_batched_tokens=6, max_num_seqs=2, prefix_caching=False
    )
    engine = Engine(model, config)
    params = SamplingParams(temperature=0, max_tokens=len(long) // 2, ignore_eos=True)
    assert engine.add(Add("text", text.numpy().tobytes(), params)) is None
    (found,) = pooled(engine, [long], mode)
    assert engine.stats.preemptions > 0
    assert (vector(found) - pooled_by_formula(states["mixed"], mode)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_a_reused_prefix_does_not_change_the_result(mode, model, states, prompts):
    """The last token's state needs only its own computation, but the other modes need states of the whole prompt."""
    engine = Engine(model, EngineConfig(kv_block_size=4))
    first, second = (pooled(engine, [prompts["prefixed"]], mode)[0] for _ in range(2))
    assert (vector(second) - pooled_by_formula(states["prefixed"], mode)).abs().max() <= TOLERANCE
    assert first.cached_tokens == 0
    assert (second.cached_tokens > 0) == (mode == "last")


def test_generating_neighbors_do_not_change_the_result(model, states, prompts):
    """Pooling requests share steps with requests that generate, and neither affects the other."""
    alone, errors = run(Engine(model, EngineConfig()), list(prompts.values()), max_tokens=12, ignore_eos=True)
    assert not errors
    engine = Engine(model, EngineConfig(max_num_batched_tokens=24))
    for i, ids in enumerate(prompts.values()):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        assert engine.add(Add(f"text {i}", ids.numpy().tobytes(), params)) is None
        for mode in MODES:
            params = SamplingParams(max_tokens=0, pooling=mode)
            assert engine.add(Add(f"{mode} {i}", ids.numpy().tobytes(), params)) is None
    tokens: dict[str, list[int]] = {}
    vectors = {}
    while engine.has_work():
        for one in engine.step().progress:
            assert one.error is None
            tokens.setdefault(one.request_id, []).extend(one.token_ids)
            if one.pooled:
                vectors[one.request_id] = vector(one)
    for i, name in enumerate(prompts):
        assert tokens[f"text {i}"] == alone[i]
        for mode in MODES:
            difference = vectors[f"{mode} {i}"] - pooled_by_formula(states[name], mode)
            assert difference.abs().max() <= TOLERANCE, (name, mode)


def test_a_non_finite_state_fails_only_its_request(model, prompts, monkeypatch):
    """A request whose states overflow fails with an error, and its neighbor gets its result."""
    head_input = model.states

    def overflowing(input_ids, *arguments):
        states = head_input(input_ids, *arguments).clone()
        states[0] = torch.inf
        return states

    monkeypatch.setattr(model, "states", overflowing)
    broken, whole = pooled(Engine(model, EngineConfig()), [prompts["text"], prompts["one image"]], "last")
    assert "non-finite" in broken.error.message
    assert vector(whole).isfinite().all()


def test_an_aborted_request_leaves_nothing(model, prompts):
    """Abort one of two requests between its chunks. The other gets its result."""
    engine = Engine(model, EngineConfig(max_num_batched_tokens=8))
    for name in ("first", "second"):
        params = SamplingParams(max_tokens=0, pooling="mean")
        assert engine.add(Add(name, prompts["text"].numpy().tobytes(), params)) is None
    engine.step()
    engine.abort(Abort("first"))
    left = []
    while engine.has_work():
        left += engine.step().progress
    assert [(one.request_id, len(one.pooled)) for one in left] == [("second", 4 * model.spec.hidden_size)]
    assert engine.stats.kv_cache_usage == 0


def test_pooling_generates_no_tokens():
    with pytest.raises(InputError, match=r"max_tokens=4 must be 0 with pooling='last'"):
        SamplingParams(max_tokens=4, pooling="last").check(10)
    with pytest.raises(InputError, match="pooling"):
        msgspec.structs.replace(SamplingParams(max_tokens=0), pooling="max").check(10)
