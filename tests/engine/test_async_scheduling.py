"""Tests for asynchronous scheduling: each step is launched before the tokens of the step before have arrived."""

import random

import numpy as np
import pytest
import torch

from mindie_mm.device.cpu import CPU
from mindie_mm.engine.core import Engine
from mindie_mm.engine.draws import Draws
from mindie_mm.engine.requests.engine_messages import Abort, Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.structured.grammar import Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from tests.models.contract import noise

QUESTION = {"text": "What is in the image? Describe this picture."}
PROMPTS = [
    [{"text": "Hello there"}],
    [{"image": noise(60, 90)}, QUESTION],
    [{"image": noise(60, 90)}, QUESTION, {"text": "And what is to the left of it?"}],
    [{"text": "Hello there, what is a red square? And what is a blue one?"}],
]
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "presence_penalty": 0.4},
    {"temperature": 0.8, "min_p": 0.05, "bad_token_ids": [(300,), (7, 8)], "logprobs": 0},
    {"temperature": 0.7, "structured_outputs": StructuredOutputs(regex="(red|green|blue)( (square|circle)){0,12}!")},
    {"temperature": 0.0, "json_schema": '{"enum": ["a long value", "another long value", 1]}'},
    {"temperature": 1.0, "stop_token_ids": [*range(0, 400, 3)], "min_tokens": 3},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
    {"temperature": 0.0, "allowed_token_ids": [5, 6, 7, 290]},
]


@pytest.fixture(scope="module")
def model(device):
    return load_model(None, device=device)


@pytest.fixture(scope="module")
def grammars(model):
    return Grammars(load_tokenizer(Checkpoint.open(None)), model.spec.eos_token_ids, 1)


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch):
    """Let the CPU use asynchronous scheduling, too. Its results arrive at once, but the engine reads them late."""
    monkeypatch.setattr(CPU, "is_asynchronous", True)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path_file = tmp_path_factory.mktemp("prompts") / "shm_name.txt"
    with Tokenizer.from_pretrained(Checkpoint.open(None).path) as tokenizer:
        yield [tokenizer.tokenize(items, path_file).numpy() for items in PROMPTS]
        release(path_file)


def engines(model, grammars, **settings):
    """Return two engines with the same settings, without and with asynchronous scheduling."""
    made = []
    for is_asynchronous in (False, True):
        engine = Engine(model, EngineConfig(async_scheduling=is_asynchronous, **settings), 2**24)
        engine.grammars = grammars
        made.append(engine)
    return made


def plan(prompts, seed, count=24):
    """Return requests with random prompts and settings, each with the step at which it arrives."""
    choose = random.Random(seed)
    requests = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        ends = "json_schema" in kind or "structured_outputs" in kind
        params = SamplingParams(
            seed=number, max_tokens=choose.choice((3, 9, 30)), ignore_eos=not ends and choose.random() < 0.5, **kind
        )
        ids = prompts[choose.randrange(len(prompts))]
        requests.append((choose.randrange(40), Add(str(number), ids.tobytes(), params, float(number))))
    return sorted(requests, key=lambda one: one[0])


def answers(engine, requests, aborted=()):
    """Run requests, and return what each was told, without times. A request whose media are gone is added again."""
    told = {add.request_id: [] for _, add in requests}
    adds = {add.request_id: add for _, add in requests}
    left = [*requests]
    step = 0
    while left or engine.has_work():
        news = []
        while left and left[0][0] <= step:
            news.append(engine.add(left.pop(0)[1]))
        for at, name in aborted:
            if at == step:
                engine.abort(Abort(name))
        news += engine.step().progress
        for progress in filter(None, news):
            own = told[progress.request_id]
            if progress.error and progress.error.name == "StaleReference":
                add = adds[progress.request_id]
                drawn = [token for one in own for token in one[0]]
                assert engine.add(Add(add.request_id, add.input_ids, add.params, add.asked_s, drawn_ids=drawn)) is None
                continue
            assert progress.error is None, (progress.request_id, progress.error)
            if progress.token_ids or progress.finish_reason:
                scores = [(one.token_id, pytest.approx(one.logprob, abs=1e-3)) for one in progress.logprobs or ()]
                own.append((progress.token_ids, scores, progress.finish_reason, progress.stop_token_id))
        step += 1
    assert engine.stats.num_running == engine.stats.num_waiting == 0
    assert engine.stats.kv_cache_usage == 0
    return told


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 5},
        {"kv_block_size": 4, "kv_blocks": 40, "max_num_seqs": 8},
        {"kv_block_size": 4, "kv_blocks": 40, "prefix_caching": False, "encoder_cache_bytes": 0},
    ],
    ids=["joins", "chunks", "preemption", "preemption that loses media"],
)
def test_tokens_are_the_same_as_step_by_step(model, grammars, prompts, settings):
    settings = {"max_model_len": 120, **settings}
    if blocks := settings.pop("kv_blocks", None):
        settings["kv_cache_bytes"] = blocks * 4 * model.spec.kv_token_bytes
    plain, ahead = engines(model, grammars, **settings)
    requests = plan(prompts, seed=len(settings))
    assert answers(ahead, requests) == answers(plain, requests)
    assert (ahead.stats.preemptions > 0) == (plain.stats.preemptions > 0) == (blocks is not None)


def test_captured_steps_read_the_tokens_of_the_step_before(model, grammars, prompts, recorded):
    plain, ahead = engines(model, grammars, kv_block_size=4, max_num_seqs=6)
    requests = plan(prompts, 5)
    assert answers(ahead, requests) == answers(plain, requests)
    assert sum(recorded) > 50


def test_aborted_requests_leave_the_tokens_of_others_as_they_are(model, grammars, prompts):
    plain, ahead = engines(model, grammars, kv_block_size=4, max_num_batched_tokens=32)
    requests = plan(prompts, 7)
    choose = random.Random(1)
    aborted = [(choose.randrange(60), str(number)) for number in range(0, 24, 3)]
    expected, found = answers(plain, requests), answers(ahead, requests, aborted)
    names = {name for _, name in aborted}
    assert any(len(found[name]) < len(expected[name]) for name in names)
    for name, told in found.items():
        assert told == (expected[name][: len(told)] if name in names else expected[name])


def test_an_id_that_is_used_again_gets_only_its_own_tokens(model, grammars, prompts):
    plain, ahead = engines(model, grammars)
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    first, second = (Add("a", prompts[n].tobytes(), SamplingParams(**greedy)) for n in (0, 3))
    assert ahead.add(first) is None
    ahead.step()
    ahead.abort(Abort("a"))
    assert answers(ahead, [(0, second)]) == answers(plain, [(0, second)])


def test_a_late_stop_costs_one_token_and_a_known_end_costs_none(model, grammars, prompts, monkeypatch):
    computed = []

    def counted(own):
        def forward(step, *rest):
            computed.extend(one.stop - one.start for one in step)
            return own(step, *rest)

        return forward

    _, ahead = engines(model, grammars, prefix_caching=False)
    monkeypatch.setattr(ahead._runner, "forward", counted(ahead._runner.forward))
    greedy = {"temperature": 0, "ignore_eos": True}
    ids = prompts[0]
    told = answers(ahead, [(0, Add("a", ids.tobytes(), SamplingParams(max_tokens=5, **greedy)))])["a"]
    assert sum(computed) == len(ids) + 4
    computed.clear()
    tokens = [token for one in told for token in one[0]]
    stop = SamplingParams(max_tokens=50, stop_token_ids=[tokens[2]], **greedy)
    *_, (_, _, reason, stop_token_id) = answers(ahead, [(0, Add("a", ids.tobytes(), stop))])["a"]
    assert (reason, stop_token_id) == ("stop", tokens[2])
    assert sum(computed) == len(ids) + tokens.index(tokens[2]) + 1


def test_a_step_that_fails_to_launch_does_not_lose_the_tokens_of_the_step_before(model, grammars, prompts, monkeypatch):
    plain, ahead = engines(model, grammars)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3)
    requests = [(0, Add("a", prompts[0].tobytes(), params))]
    expected = answers(plain, requests)["a"]
    assert ahead.add(requests[0][1]) is None
    assert not ahead.step().progress
    with monkeypatch.context() as patched:
        patched.setattr(ahead._runner, "forward", lambda *_: 1 / 0)
        token, failure = ahead.step().progress
    assert token.token_ids == expected[0][0]
    assert failure.error.name == "DeviceError"
    assert not ahead.has_work()
    assert answers(ahead, requests)["a"] == expected


def test_numbers_that_fail_an_aborted_request_are_not_shared(model, grammars):
    """The prompt's first blocks have been published, and the request is aborted before its NaN is known."""
    plain, ahead = engines(model, grammars, kv_block_size=4, max_num_batched_tokens=8)
    add = Add("lost", np.arange(10, 60, dtype=np.int64).tobytes(), SamplingParams(temperature=0, max_tokens=4))
    assert ahead.add(add) is None
    request = ahead._requests["lost"]
    while request.num_computed < request.num_prompt:
        ahead.step()
        for pages in (*ahead._runner._cache.keys.values(), *ahead._runner._cache.values.values()):
            pages[: ahead._blocks.num_blocks] = torch.nan
    ahead.abort(Abort("lost"))
    again = [(0, Add("again", add.input_ids, add.params))]
    while ahead.has_work():
        ahead.step()
    assert answers(ahead, again) == answers(plain, again)


def test_a_chunk_of_a_failed_step_does_not_continue(model, grammars, monkeypatch):
    """The prompt's next chunk is not in the step that finds out, because another prompt uses up the budget."""
    _, ahead = engines(model, grammars, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=4)
    assert ahead.add(Add("chunk", np.arange(10, 30, dtype=np.int64).tobytes(), params)) is None
    ahead.step()
    with monkeypatch.context() as patched:
        patched.setattr(Draws, "wait", lambda _: 1 / 0)
        patched.setattr(ahead._scheduler, "schedule", lambda _: [])
        assert [one.error.name for one in ahead.step().progress] == ["DeviceError"]
    assert not ahead.has_work()


def test_tokens_that_never_arrive_fail_the_requests_of_both_steps(model, grammars, prompts, monkeypatch):
    plain, ahead = engines(model, grammars)
    greedy = {"temperature": 0, "ignore_eos": True}
    adds = [Add(str(n), prompts[0].tobytes(), SamplingParams(max_tokens=n, **greedy)) for n in (1, 3)]
    for add in adds:
        assert ahead.add(add) is None
    ahead.step()
    assert ahead.add(Add("new", prompts[3].tobytes(), SamplingParams(max_tokens=2, **greedy))) is None
    with monkeypatch.context() as patched:
        patched.setattr(Draws, "wait", lambda _: 1 / 0)
        failures = {one.request_id: one.error.name for one in ahead.step().progress}
    assert failures == dict.fromkeys(("1", "3", "new"), "DeviceError")
    assert not ahead.has_work()
    requests = [(0, add) for add in adds]
    assert answers(ahead, requests) == answers(plain, requests)


def test_a_prompt_waits_for_the_same_prefix_that_is_being_computed(model, grammars):
    """The blocks of a prompt are published one step late. An equal prompt that arrives then does not compute them."""
    _, ahead = engines(model, grammars, kv_block_size=4)
    ids = np.arange(10, 60, dtype=np.int64)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert ahead.add(Add("first", ids.tobytes(), params)) is None
    ahead.step()
    assert ahead.add(Add("second", ids.tobytes(), params)) is None
    while ahead.has_work():
        ahead.step()
    assert ahead.stats.prefix_cache_hits == 48
