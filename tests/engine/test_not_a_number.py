"""Tests that non-finite numbers fail only the request that they belong to."""

import numpy as np
import pytest
import torch

from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add, Encode
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.models import load_model
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import noise, run


@pytest.fixture(scope="module")
def model(random_checkpoint, device):
    return load_model(random_checkpoint, device=device)


@pytest.fixture(scope="module")
def prompts(random_checkpoint):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        texts = ("Hello there", "What is a red square? And what is a blue one, or a green one?", "Hi")
        return [tokenizer.tokenize([{"text": text}]) for text in texts]


def spoil(engine):
    """Fill all KV blocks with NaN, as a request might leave them if its numbers overflowed."""
    for pages in (*engine._runner._cache.keys.values(), *engine._runner._cache.values.values()):
        pages[: engine._blocks.num_blocks] = torch.nan


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"kv_block_size": 4}])
def test_old_contents_of_a_block_are_never_read(model, prompts, settings):
    config = EngineConfig(prefix_caching=False, **settings)
    expected = run(Engine(model, config), prompts, max_tokens=40, ignore_eos=True)
    engine = Engine(model, config)
    spoil(engine)
    assert run(engine, prompts, max_tokens=40, ignore_eos=True) == expected


def test_a_request_with_nan_logits_affects_no_other_request_and_shares_no_prefix(model, prompts):
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=8)
    engine = Engine(model, EngineConfig(kv_block_size=4, async_scheduling=False))
    assert engine.add(Add("lost", prompts[1].numpy().tobytes(), params)) is None
    engine.step()
    spoil(engine)
    assert engine.add(Add("other", prompts[0].numpy().tobytes(), params)) is None
    news = engine.step().progress
    assert {one.request_id: one.error for one in news if one.error} == {
        "lost": Failure("OperationalError", "the model returned non-finite logits for this request")
    }
    assert [one.token_ids for one in news if one.request_id == "other" and one.token_ids]
    while engine.has_work():
        assert not [one.error for one in engine.step().progress if one.error]


def test_a_prompt_that_failed_is_computed_again(model, prompts):
    """KV blocks of the failed prompt's first chunk are not reused.

    They may contain or have caused the non-finite numbers.
    """
    params = SamplingParams(temperature=0, max_tokens=3)
    expected, _ = run(Engine(model, EngineConfig(kv_block_size=4)), prompts[1:2], max_tokens=3)
    engine = Engine(model, EngineConfig(kv_block_size=4, max_num_batched_tokens=8, async_scheduling=False))
    assert engine.add(Add("lost", prompts[1].numpy().tobytes(), params)) is None
    assert not [one for one in engine.step().progress if one.token_ids]
    spoil(engine)
    while engine.has_work():
        *_, lost = engine.step().progress or [None]
    assert lost.error.name == "OperationalError"
    assert run(engine, prompts[1:2], max_tokens=3) == (expected, {})
    assert engine.stats.prefix_cache_hits == 0


def test_features_that_may_have_failed_a_request_are_encoded_again(model, random_checkpoint, tmp_path):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        ids = [tokenizer.tokenize([{"image": noise(56, 84)}, {"text": "Look"}], tmp_path / "shm_name.txt")]
        expected, _ = run(Engine(model, EngineConfig()), ids, max_tokens=3)
        engine = Engine(model, EngineConfig(prefix_caching=False))
        run(engine, ids, max_tokens=1)
        (features,) = engine._encoder_cache._features.values()
        with torch.inference_mode():
            features.fill_(torch.nan)
        _, errors = run(engine, ids, max_tokens=3)
        assert errors[0].name == "OperationalError"
        assert run(engine, ids, max_tokens=3) == (expected, {})
        release(tmp_path / "shm_name.txt")


@pytest.mark.usefixtures("unmapped")
def test_features_that_cannot_be_encoded_fail_only_their_own_request(model, random_checkpoint, tmp_path):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        ids = tokenizer.tokenize([{"image": noise(56, 84)}], tmp_path / "shm_name.txt")
        engine = Engine(model, EngineConfig())
        assert engine.add(Add("other", ids.numpy().tobytes(), SamplingParams(max_tokens=2, ignore_eos=True))) is None
        encode = Encode("encode", ids.numpy().tobytes())
        assert engine.encode(encode).features
        weight = [*model.module.model.visual.parameters()][-1]
        with torch.inference_mode():
            kept = weight.clone()
            weight.fill_(torch.nan)
            error = engine.encode(encode).error
            weight.copy_(kept)
        assert error == Failure("OperationalError", "the tower returned non-finite features for the image")
        while engine.has_work():
            assert not [one.error for one in engine.step().progress if one.error]
        release(tmp_path / "shm_name.txt")
        assert engine.encode(encode).error.name == "StaleReference"
        too_large = np.array([*ids, model.spec.vocab_size])
        assert engine.encode(Encode("encode", too_large.tobytes())).error.name == "TokenOutOfRange"


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_non_finite_logits_fail_only_their_own_rows(model, number):
    """Infinity also fails a row: float16 overflows above 65,504, and softmax turns infinity into NaN."""
    settings = ({"temperature": 0, "logprobs": 2}, {"seed": 3}, {"temperature": 0, "logprobs": 0}, {"seed": 4})
    logits = torch.randn(4, model.spec.vocab_size, generator=torch.Generator().manual_seed(1)).to(model.spec.device)
    logits[:, 6] = -torch.inf  # a model may mask a token with minus infinity, which is not an error

    def drawn(rows):
        engine = Engine(model, EngineConfig())
        for row in rows:
            params = SamplingParams(**settings[row])
            assert engine.add(Add(str(row), np.arange(5, dtype=np.int64).tobytes(), params)) is None
        return engine._draw(logits[rows].clone(), [*engine._requests.values()]).wait()

    whole = drawn([0, 1, 2, 3])
    assert [draw[1] and [len(one.top) for one in draw[1]] for draw in whole] == [[2], None, [0], None]
    assert [drawn([row]) for row in range(4)] == [[draw] for draw in whole], (
        "each row has the same draw as in a batch of its own"
    )
    logits[[0, 3], 5] = number
    assert drawn([0, 1, 2, 3]) == [None, *whole[1:3], None]
