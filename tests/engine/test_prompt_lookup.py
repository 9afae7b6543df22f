"""Tests for guesses of the next tokens, which a step checks together."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mindie_mm.device.cpu import CPU
from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.core import Engine
from mindie_mm.engine.prompt_lookup import NGRAM, PromptLookup
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.scheduler import Scheduler, TowerLimits
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import Positions
from mindie_mm.settings.config import EngineConfig
from mindie_mm.structured.grammar import Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from tests.engine import test_async_scheduling
from tests.engine.test_async_scheduling import answers, plan
from tests.engine.test_continued import numbers, run, tokens
from tests.models.test_qwen3_5 import TestQwen35 as Recurrent

GUESSES = 7
prompts = test_async_scheduling.prompts
PROMPT = np.array([*range(10, 40), *range(100, 130), *range(10, 25)], np.int64)
FEW = (100, 101, 102, 103, 104)
DRAWN = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2)
SCHEMA = {"type": "array", "items": {"enum": ["the same value", "the same words"]}, "minItems": 6, "maxItems": 6}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "seed": 3},
    "filtered": {"temperature": 0.9, "seed": 5, "top_k": 3, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.2, "frequency_penalty": 0.05, "repetition_penalty": 1.02},
    "few tokens": {"temperature": 1.0, "seed": 1, "allowed_token_ids": FEW, "logit_bias": {101: 6.0}},
    "bad tokens": {"bad_token_ids": ((20,), (101, 102)), "allowed_token_ids": (*FEW, 20)},
    "end tokens": {"stop_token_ids": (103,), "min_tokens": 30, "allowed_token_ids": FEW},
    "structure": {"structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA)), "ignore_eos": False},
    "named logprobs": {"logprob_token_ids": (5, 9)},
}


@pytest.fixture(scope="module")
def model(device: str) -> Any:
    return load_model(None, device, "float32")


@pytest.fixture(scope="module")
def grammars(model: Any) -> Grammars:
    return Grammars(load_tokenizer(Checkpoint.open(None)), model.spec.eos_token_ids)


def engines(model: Any, grammars: Grammars, **settings: Any) -> tuple[Engine, Engine]:
    """Return two engines with the same settings, without and with guesses."""
    made = []
    for number in (0, GUESSES):
        engine = Engine(model, EngineConfig(num_speculative_tokens=number, **settings), 2**24)
        engine.grammars = grammars
        made.append(engine)
    plain, guessing = made
    return plain, guessing


def guesses_of(text: str, most: int = GUESSES) -> list[str]:
    """Return the guesses after each character of a text, when the characters arrive one after another."""
    lookup, ids = PromptLookup(), [*text.encode()]
    return [bytes(lookup.guess(ids[:stop], most)).decode() for stop in range(1, len(ids) + 1)]


def test_guesses_are_checked_after_some_were_right_until_some_are_wrong() -> None:
    text = "the cat sat on it. the cat sat on it. the dog ran"
    found = guesses_of(text)
    again, changed = text.index("the cat", 1), text.index("dog")
    assert not any(found[: again + NGRAM + 1])
    assert found[again + NGRAM + 1] == "a", "after 2 right guesses"
    assert found[changed - 1] == "cat sat"
    assert not any(found[changed:]), "the last tokens have not occurred before"
    repeated, wrong = "abc1" * 8, "abc2abc3abc4abc5abc6"
    found = guesses_of(repeated + wrong)[len(repeated) :]
    assert [len(guesses) for guesses in found[NGRAM - 1 :: NGRAM + 1]] == [7, 3, 1, 1, 0]


def test_guesses_continue_where_the_tokens_end() -> None:
    assert guesses_of("abc" * 20)[-1] == "abcabca"


def test_guesses_follow_one_place_while_they_are_right() -> None:
    """The last tokens also occur later, with another next token."""
    text = "xyz1 xyz2 xyz3 xyz4 xyz5. xyz1 xyz2 xyz3 xyz"
    assert guesses_of(text)[-1] == "4 xyz5."


def test_several_tokens_may_arrive_together() -> None:
    lookup, ids = PromptLookup(), [*range(20)] * 3
    lookup.guess(ids[:40], GUESSES)
    lookup.guess(ids[:43], GUESSES)
    assert lookup.guess(ids[:50], GUESSES) == tuple(range(10, 17))
    assert lookup.guess(ids[:50], 2) == (10, 11)
    assert lookup.guess([*ids[:50], 99], GUESSES) == (), "99 has not occurred before"


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_same_as_without_guesses(model: Any, grammars: Grammars, case: str) -> None:
    params = msgspec.structs.replace(DRAWN, **CASES[case])
    plain, guessing = engines(model, grammars, kv_block_size=4)
    expected, found = run(plain, PROMPT, params), run(guessing, PROMPT, params)
    assert tokens(found) == tokens(expected)
    assert numbers(found) == pytest.approx(numbers(expected), abs=1e-4)
    assert (found[-1].finish_reason, found[-1].stop_token_id) == (
        expected[-1].finish_reason,
        expected[-1].stop_token_id,
    )
    assert guessing.stats.draft_tokens >= guessing.stats.accepted_tokens > 3
    assert guessing.stats.draft_tokens >= guessing.stats.drafts > 0
    assert guessing.stats.kv_cache_usage == plain.stats.drafts == 0
    # An output continues in an engine that has not seen its first tokens.
    whole, origin = tokens(expected), expected[0].origin
    for count in (1, len(whole) // 2, len(whole) - 2):
        assert tokens(run(guessing, PROMPT, params, drawn_ids=whole[:count], origin=origin)) == whole[count:]


@pytest.mark.parametrize("overlaps", [False, True], ids=["step by step", "asynchronous"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 3},
        {"max_num_seqs": 2, "kv_block_size": 4, "max_num_batched_tokens": 8},
        {"max_num_seqs": 4, "kv_block_size": 4, "kv_blocks": 31},
    ],
    ids=["joins", "chunks", "preemption"],
)
def test_requests_join_and_leave_beside_guesses(
    model: Any,
    grammars: Grammars,
    prompts: Any,
    settings: dict[str, Any],
    overlaps: bool,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(CPU, "is_asynchronous", overlaps)
    settings = {"max_model_len": 120, **settings}
    if blocks := settings.pop("kv_blocks", None):
        settings["kv_cache_bytes"] = blocks * 4 * model.spec.kv_token_bytes
    plain, guessing = engines(model, grammars, **settings)
    requests = plan(prompts, seed=3)
    assert answers(guessing, requests) == answers(plain, requests)
    assert guessing.stats.accepted_tokens > 0
    assert (guessing.stats.preemptions > 0) == (blocks is not None)
    assert (guessing.stats.draft_tokens > guessing.stats.accepted_tokens) or blocks is not None


def test_steps_without_guesses_are_still_captured(model: Any, grammars: Grammars, recorded: list[int]) -> None:
    plain, guessing = engines(model, grammars)
    expected = run(plain, PROMPT, DRAWN)
    before = len(recorded)
    assert tokens(run(guessing, PROMPT, DRAWN)) == tokens(expected)
    assert len(recorded) > before
    assert guessing.stats.accepted_tokens


@pytest.mark.parametrize(("name", "guesses"), [("is_asynchronous", 0), ("records", 0), ("name", GUESSES)])
def test_tokens_are_guessed_by_default_where_steps_neither_overlap_nor_are_captured(
    model: Any, name: str, guesses: int, monkeypatch: pytest.MonkeyPatch, recorded: list[int]
) -> None:
    monkeypatch.setattr(CPU, "records", False)
    monkeypatch.setattr(CPU, name, True if name != "name" else CPU.name)
    assert Engine(model, EngineConfig(), 2**24)._scheduler._most_guesses == guesses


def test_recurrent_models_do_not_guess(
    tmp_path_factory: pytest.TempPathFactory, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    Recurrent.write_checkpoint(path := tmp_path_factory.mktemp("recurrent"))
    model = load_model(path, device)
    with caplog.at_level(logging.WARNING):
        engine = Engine(model, EngineConfig(num_speculative_tokens=GUESSES), 2**22)
    assert "no tokens are guessed, because states of recurrent layers cannot be undone" in caplog.text
    run(engine, PROMPT, msgspec.structs.replace(DRAWN, logprobs=None))
    assert not engine.stats.drafts


def scheduler(*lengths: int, blocks: int = 100, **settings: Any) -> tuple[Scheduler, list[Request]]:
    """Return a scheduler with requests whose prompts and outputs repeat one token. The prompts have been computed."""
    config = EngineConfig(**settings)
    limits = TowerLimits(100, 10**6, 4)
    sched = Scheduler(config, BlockPool(blocks, 4), EncoderCache(10**6), limits, None, GUESSES, 8)
    requests = [
        Request(
            request_id=str(number),
            params=SamplingParams(temperature=0),
            token_ids=[5] * length,
            num_prompt=length,
            items=(),
            prompt_positions=Positions(torch.arange(length).unsqueeze(0)),
            span_ids=None,
            max_tokens=20,
            generator=None,
        )
        for number, length in enumerate(lengths)
    ]
    for request in requests:
        sched.add(request)
    decode(sched)
    return sched, requests


def decode(sched: Scheduler) -> list[int]:
    """Run a step without accepting its guesses. Return the number of guesses of each request."""
    step = sched.schedule()
    sched.computed(step)
    for scheduled in step:
        assert scheduled.end <= len(scheduled.request.kv_blocks) * 4
        if scheduled.samples:
            scheduled.request.append(5)
    return [len(scheduled.guesses) for scheduled in step]


def steady(sched: Scheduler) -> list[int]:
    """Return the numbers of guesses when all guesses so far were right."""
    return [decode(sched) for _ in range(9)][-1]


@pytest.mark.parametrize(("count", "guesses"), [(1, 7), (2, 3), (4, 1), (5, 0)])
def test_requests_share_the_rows_that_cost_little(count: int, guesses: int) -> None:
    sched, _ = scheduler(*[6] * count)
    assert steady(sched) == [guesses] * count


def test_a_step_has_no_more_guesses_than_tokens_are_left() -> None:
    sched, (request,) = scheduler(6)
    while request.num_output < 20:
        found = decode(sched)
        assert found[0] <= 20 - request.num_output
    assert request.num_computed == request.num_tokens - 1


def test_guesses_fit_the_budget_of_tokens() -> None:
    sched, _ = scheduler(6, max_num_batched_tokens=4)
    assert steady(sched) == [3]


def test_guesses_take_no_block_that_a_request_may_need() -> None:
    sched, requests = scheduler(6, 6, blocks=7)
    while all(len(request.token_ids) < 13 for request in requests):
        decode(sched)
        assert all(len(request.kv_blocks) <= -(-(len(request.token_ids) + 3) // 4) for request in requests)
    assert not sched.preemptions


def test_positions_that_change_with_the_length_limit_the_guesses() -> None:
    sched, (request,) = scheduler(6)
    request.prompt_positions = Positions(torch.arange(6).unsqueeze(0), longer=request.prompt_positions, most_tokens=17)
    while request.num_tokens < 16:
        decode(sched)
    assert decode(sched) == [1]
    assert decode(sched) == [0]
