"""Tests for models with recurrent layers, whose states are in slots beside the KV blocks."""

import random
import re
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from mindie_mm.device.cpu import CPU
from mindie_mm.device.cpu.step_memory import allocated_peak_bytes
from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.kv_cache_size import cache_sizes, useful_bytes
from mindie_mm.engine.cache.state_pool import StatePool
from mindie_mm.engine.core import Engine
from mindie_mm.engine.process.largest_step import WorstCase
from mindie_mm.engine.requests.engine_messages import Abort, Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import DeviceError
from mindie_mm.models import load_model
from mindie_mm.models._delta_net import GatedDeltaNet
from mindie_mm.settings.config import EngineConfig
from tests.models import test_qwen3_5
from tests.models.contract import run

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SYSTEM = [*range(10, 10 + 5 * BLOCK)]
PROMPTS = [
    torch.tensor(ids)
    for ids in (
        [7],
        SYSTEM,
        [*SYSTEM, 200, 201, 202],
        [*SYSTEM, 200, 201, 202, *range(60, 100)],
        [*range(150, 163)],
        [*SYSTEM, *range(120, 140)],
    )
]


@pytest.fixture(scope="module")
def model(tmp_path_factory, device):
    path = tmp_path_factory.mktemp("recurrent")
    test_qwen3_5.TestQwen35.write_checkpoint(path)
    return load_model(path, device=device)


@pytest.fixture(scope="module")
def expected(model):
    """The output of each prompt, computed alone, in one step, and without prefix caching."""
    engine = Engine(model, EngineConfig(prefix_caching=False))
    return [run(engine, [ids], max_tokens=6, ignore_eos=True)[0][0] for ids in PROMPTS]


def engine_of(model, slots=None, blocks=200, **settings):
    """Return an engine that uses only this number of slots, or enough slots, and this number of KV blocks."""
    engine = Engine(model, EngineConfig(kv_block_size=BLOCK, **settings), 2**22)
    engine._blocks = engine._scheduler._blocks = BlockPool(blocks, BLOCK)
    if slots is not None:
        engine._scheduler._states = StatePool(slots)
    return engine


def assert_all_free(engine):
    """Assert that no slot and no KV block is in use, and that the index of snapshots is consistent."""
    scheduler, states = engine._scheduler, engine._scheduler._states
    scheduler._free_read()
    assert not any(states._holders)
    assert sorted([*states._free, *states._keys]) == [*range(states.num_slots)]
    assert {slot: key for key, slot in states._slots.items()} == states._keys
    assert engine.stats.kv_cache_usage == 0


def ask(engine, ids):
    """Run one request. Return its number of cached tokens and its output."""
    assert engine.add(Add("r", ids.numpy().tobytes(), GREEDY)) is None
    news = []
    while engine.has_work():
        news += (one for one in engine.step().progress if one.token_ids)
    return news[0].cached_tokens, [token for one in news for token in one.token_ids]


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["step by step", "asynchronous"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_caching": False},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 7, "slots": 1},
        {"slots": 2},
        {"slots": 3, "max_num_seqs": 2},
        {"blocks": 24, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_batch_or_on_the_number_of_slots(
    settings, is_asynchronous, model, expected, monkeypatch
):
    monkeypatch.setattr(CPU, "is_asynchronous", is_asynchronous)
    engine = engine_of(model, **settings)
    for order in ([*range(len(PROMPTS))], [5, 4, 3, 2, 1, 0], [3, 3, 2, 5]):
        outputs, errors = run(engine, [PROMPTS[number] for number in order], max_tokens=6, ignore_eos=True)
        assert not errors
        assert [*outputs.values()] == [expected[number] for number in order]
        assert_all_free(engine)
    assert (engine.stats.preemptions > 0) == ("blocks" in settings)


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["step by step", "asynchronous"])
def test_captured_steps_read_and_write_the_same_states(model, expected, is_asynchronous, recorded, monkeypatch):
    monkeypatch.setattr(CPU, "is_asynchronous", is_asynchronous)
    engine = engine_of(model, max_num_batched_tokens=30)
    for order in ([*range(len(PROMPTS))], [5, 4, 3, 2, 1, 0], [3]):
        outputs, errors = run(engine, [PROMPTS[number] for number in order], max_tokens=6, ignore_eos=True)
        assert not errors
        assert [*outputs.values()] == [expected[number] for number in order]
    assert engine._runner._graphs is not None
    assert engine._runner._graphs._graphs
    assert_all_free(engine)


def test_a_longer_prompt_continues_from_the_snapshot_of_a_shorter_one(model, expected):
    engine = engine_of(model)
    assert ask(engine, PROMPTS[2]) == (0, expected[2])
    assert ask(engine, PROMPTS[3]) == (5 * BLOCK, expected[3])
    assert ask(engine, PROMPTS[3]) == (15 * BLOCK, expected[3])
    # The whole prompt is cached, but there is no snapshot within its last block.
    assert ask(engine, PROMPTS[1]) == (0, expected[1])
    assert ask(engine, PROMPTS[1]) == (4 * BLOCK, expected[1])
    assert ask(engine, PROMPTS[5]) == (5 * BLOCK, expected[5])
    assert engine.stats.prefix_cache_hits == (5 + 15 + 4 + 5) * BLOCK
    assert_all_free(engine)


def test_the_second_request_with_a_system_prompt_leaves_a_snapshot_after_it(model, expected):
    engine = engine_of(model)
    assert [ask(engine, PROMPTS[number])[0] for number in (5, 3, 2)] == [0, 0, 5 * BLOCK]
    assert ask(engine, PROMPTS[5]) == (9 * BLOCK, expected[5])
    assert ask(engine, PROMPTS[3]) == (15 * BLOCK, expected[3])
    assert_all_free(engine)


def test_the_least_recently_used_snapshot_is_evicted(model, expected):
    engine = engine_of(model, slots=3)
    prompts = [torch.tensor([*range(start, start + 9)]) for start in (20, 120, 220)]
    for ids in prompts:
        assert ask(engine, ids)[0] == 0
    # One of the three slots was needed by the request itself.
    assert [ask(engine, ids)[0] for ids in (prompts[2], prompts[1])] == [2 * BLOCK] * 2
    assert ask(engine, prompts[0])[0] == 0
    assert ask(engine, prompts[1])[0] == 2 * BLOCK
    assert ask(engine, prompts[2])[0] == 0


def test_requests_with_different_salts_share_no_snapshot(model):
    engine = engine_of(model)
    for salt, hits in (("", 0), ("a", 0), ("b", 0), ("a", 4 * BLOCK)):
        params = SamplingParams(temperature=0, max_tokens=1, cache_salt=salt)
        before = engine.stats.prefix_cache_hits
        assert engine.add(Add("r", PROMPTS[1].numpy().tobytes(), params)) is None
        while engine.has_work():
            engine.step()
        assert engine.stats.prefix_cache_hits - before == hits


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["step by step", "asynchronous"])
def test_a_snapshot_with_nan_is_not_shared(model, expected, is_asynchronous, monkeypatch):
    monkeypatch.setattr(CPU, "is_asynchronous", is_asynchronous)
    engine = engine_of(model, max_num_batched_tokens=2 * BLOCK)
    assert engine.add(Add("lost", PROMPTS[3].numpy().tobytes(), GREEDY)) is None
    engine.step()
    for tensors in engine._runner._cache.states.values():
        for tensor in tensors:
            tensor.fill_(torch.nan)
    news = []
    while engine.has_work():
        news += engine.step().progress
    assert [one.error.name for one in news if one.error] == ["OperationalError"]
    assert ask(engine, PROMPTS[3]) == (0, expected[3])
    assert_all_free(engine)


@pytest.mark.parametrize("seed", range(4))
def test_aborted_and_preempted_requests_lose_no_slot(model, expected, seed, monkeypatch):
    monkeypatch.setattr(CPU, "is_asynchronous", seed % 2 == 1)
    choose = random.Random(seed)
    engine = engine_of(model, slots=choose.choice((1, 2, 3, 5)), blocks=24, max_num_batched_tokens=12)
    outputs: dict[str, list[int]] = {}
    numbers: dict[str, int] = {}
    for name in map(str, range(30)):
        numbers[name] = choose.randrange(len(PROMPTS))
        outputs[name] = []
        assert engine.add(Add(name, PROMPTS[numbers[name]].numpy().tobytes(), GREEDY)) is None
        for _ in range(choose.randrange(4)):
            for progress in engine.step().progress:
                outputs[progress.request_id] += progress.token_ids
        if choose.random() < 0.3:
            aborted = choose.choice([*outputs])
            engine.abort(Abort(aborted))
            numbers.pop(aborted, None)
    while engine.has_work():
        for progress in engine.step().progress:
            outputs[progress.request_id] += progress.token_ids
    assert {name: outputs[name] for name in numbers} == {name: expected[number] for name, number in numbers.items()}
    assert_all_free(engine)


def test_one_request_of_full_length_comes_before_further_states(model, caplog):
    spec = model.spec
    one, state = 25 * BLOCK * spec.kv_token_bytes, spec.state_bytes
    config = EngineConfig(kv_block_size=BLOCK, max_model_len=100, max_num_seqs=3, prefix_caching=False)
    assert cache_sizes(spec, config, one + 2 * state) == (25, 1)
    assert cache_sizes(spec, config, one + 6 * state)[1] == 3
    assert cache_sizes(spec, config, useful_bytes(model, config)) == (75, 3)
    with_snapshots = EngineConfig(kv_block_size=BLOCK, max_model_len=100, max_num_seqs=3)
    assert cache_sizes(spec, with_snapshots, useful_bytes(model, with_snapshots)) == (75, 6)
    engine = Engine(model, config, one + 3 * state)
    assert engine.ready.max_model_len == 100
    assert "at most 1 run at the same time; max_num_seqs is 3" in caplog.text


@pytest.mark.parametrize("extra", range(0, 60, 7))
def test_a_restarted_engine_divides_its_memory_as_before(model, extra):
    config = EngineConfig(kv_block_size=BLOCK, max_num_seqs=16)
    first = Engine(model, config, 2**20 + extra * 10_007)
    again = Engine(model, replace(config, kv_cache_bytes=first.ready.kv_cache_bytes))
    assert again.ready == first.ready
    assert again._scheduler._states.num_slots == first._scheduler._states.num_slots


def test_a_message_states_a_size_that_is_enough(model):
    config = EngineConfig(kv_block_size=BLOCK, max_model_len=400, kv_cache_bytes=50_000)
    with pytest.raises(DeviceError) as error:
        Engine(model, config)
    needed = int(re.search(r"needs (\d+) bytes", str(error.value))[1])
    Engine(model, replace(config, kv_cache_bytes=needed))


def test_requests_with_the_same_beginning_do_not_wait_for_each_other(model):
    """No snapshot is left at the end of the beginning, so that waiting would save nothing."""
    engine = engine_of(model)
    for number in range(8):
        ids = torch.tensor([*SYSTEM, *range(100 + 10 * number, 110 + 10 * number)])
        assert engine.add(Add(str(number), ids.numpy().tobytes(), GREEDY)) is None
    engine.step()
    assert engine.stats.num_running == 8
    same = torch.tensor([*SYSTEM, 5, 6])
    for number in range(3):
        assert engine.add(Add(f"same {number}", same.numpy().tobytes(), GREEDY)) is None
    engine.step()
    assert engine.stats.num_running == 9, "the others wait for the snapshot of the first"
    while engine.has_work():
        engine.step()
    assert engine.stats.prefix_cache_hits == 2 * len(SYSTEM)


class LargeStates(test_qwen3_5.TestQwen35):
    """Writer of a checkpoint whose states are larger than the tensors of a prefill."""

    __test__ = False
    text: ClassVar = {**test_qwen3_5.TEXT, "linear_key_head_dim": 64, "linear_value_head_dim": 128}


def test_the_computed_memory_includes_the_copies_of_states_in_a_decode_step(tmp_path):
    LargeStates.write_checkpoint(tmp_path)
    model = load_model(tmp_path, device="cpu")
    config = EngineConfig(kv_block_size=BLOCK, max_num_seqs=64, max_num_batched_tokens=64)
    worst = WorstCase(model, None, CPU(), config)
    cache = model.spec.allocate_cache(1, BLOCK, 1, is_shared=True)
    allocated = allocated_peak_bytes(worst._decode(model, cache, 64, 1))
    part = max((one() for one in worst._decoder(())), key=lambda one: one.num_bytes)
    assert part.name == "a decode step of 64 requests"
    assert part.num_bytes >= allocated > 64 * model.spec.state_bytes // 2


def test_prompts_are_computed_in_plain_torch_even_if_kernels_for_gpus_are_installed(model):
    layers = [part for part in model.module.modules() if isinstance(part, GatedDeltaNet)]
    assert len(layers) == 2
    assert not any(hasattr(layer.delta_rule, "__wrapped__") for layer in layers)
