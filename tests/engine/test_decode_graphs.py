"""Tests for recorded decode steps: one recording per batch size, and the same tokens as without recording."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mindie_mm.device import Kernels
from mindie_mm.device.cpu import CPU
from mindie_mm.device.npu import NPU
from mindie_mm.engine import decode_graphs
from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import DeviceError
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import clip, noise, run
from tests.recording import record

PROMPTS = [
    [{"text": "Hello there"}],
    [{"image": noise(60, 90)}, {"text": "What is in the image? Describe this picture."}],
    [{"video": clip(4, 56, 84)}, {"text": "What moves?"}],
]


@pytest.fixture(scope="module")
def model(random_checkpoint):
    return load_model(random_checkpoint, device="cpu")


@pytest.fixture
def prompts(random_checkpoint, tmp_path):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        yield [tokenizer.tokenize(items, tmp_path / "shm_name.txt") for items in PROMPTS]
    release(tmp_path / "shm_name.txt")


def test_recorded_steps_give_the_same_tokens(model, prompts, recorded):
    """Batches have one, two or three sequences, which grow by several blocks. Batches of three are padded to four."""
    config = EngineConfig(kv_block_size=4)
    for given in (prompts[:1], prompts[:2], prompts):
        recorded.clear()
        tokens, errors = run(Engine(model, config), given, max_tokens=40, ignore_eos=True)
        assert not errors
        # The first token of each sequence comes from the prompt's step, which is not recorded.
        assert sum(recorded) == 39
        assert len(recorded) <= 4, "recorded sizes are powers of two"
        eager = Engine(model, EngineConfig(kv_block_size=4, enforce_eager=True))
        assert (tokens, errors) == run(eager, given, max_tokens=40, ignore_eos=True)
        assert sum(recorded) == 39


def test_sequences_that_end_one_after_another_give_the_same_draws(model, prompts, recorded):
    """The spare rows of a recording are sequences of one token in the scratch block."""

    def answers(**settings):
        engine = Engine(model, EngineConfig(**settings))
        wanted = {"temperature": 0.9, "top_p": 0.9, "logprobs": 2, "ignore_eos": True}
        for number, ids in enumerate([*prompts, *prompts]):
            params = SamplingParams(seed=number, max_tokens=3 + 2 * number, **wanted)
            assert engine.add(Add(str(number), ids.numpy().tobytes(), params)) is None
        logprobs_of = {str(number): [] for number in range(6)}
        while engine.has_work():
            for progress in engine.step().progress:
                assert progress.error is None
                for one in progress.logprobs or ():
                    logprobs_of[progress.request_id].append((one.token_id, pytest.approx(one.logprob, abs=1e-3)))
        return logprobs_of

    recorded_draws = answers()
    assert sum(recorded) > 10
    assert recorded_draws == answers(enforce_eager=True)


def test_a_step_with_a_prompt_is_not_recorded(model, prompts, recorded):
    engine = Engine(model, EngineConfig(max_num_batched_tokens=8))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert engine.add(Add("answering", prompts[0].numpy().tobytes(), params)) is None
    engine.step()
    engine.step()
    before = sum(recorded)
    assert engine.add(Add("asking", prompts[1].numpy().tobytes(), params)) is None
    engine.step()
    assert sum(recorded) == before
    for _ in range(40):
        engine.step()
    assert sum(recorded) > before


def test_a_step_that_cannot_be_recorded_runs_operator_by_operator(model, prompts, monkeypatch, recorded, caplog):
    expected = run(Engine(model, EngineConfig(enforce_eager=True)), prompts, max_tokens=8)
    head = type(model).head

    def waiting(*arguments):
        logits = head(*arguments)
        return logits + float(logits[0, 0])

    monkeypatch.setattr(type(model), "head", waiting)
    assert run(Engine(model, EngineConfig()), prompts, max_tokens=8) == expected
    assert not recorded
    warning = "decode steps cannot be recorded as graphs, so each operator is launched separately: "
    assert [record.message for record in caplog.records if "recorded" in record.message] == [
        f"{warning}aten.item.default waits for the device"
    ]


@pytest.mark.parametrize(
    "waiting",
    [lambda n: n[n > 1], lambda n: n.unique(), lambda n: n.bincount(), torch.repeat_interleave],
    ids=["boolean index", "unique", "bincount", "repeat_interleave"],
)
def test_the_test_recorder_refuses_operators_that_synchronize_a_gpu(waiting):
    """The refused operators have outputs whose size depends on values on the device."""
    with pytest.raises(RuntimeError, match="waits for the device"):
        record(lambda: waiting(torch.arange(4)))


def test_the_first_error_of_a_recording_is_logged(model, prompts, monkeypatch, recorded, caplog):
    """If there are two errors, the first is logged. CUDA's second error only says that the capture was invalidated."""

    def spoiled(work):
        try:
            raise RuntimeError("waits for the device")
        finally:
            raise RuntimeError("spoiled")

    monkeypatch.setattr(CPU, "record", spoiled)
    _, errors = run(Engine(model, EngineConfig()), prompts[:1], max_tokens=4)
    assert not errors
    assert [record.message for record in caplog.records if "recorded" in record.message] == [
        "decode steps cannot be recorded as graphs, so each operator is launched separately: waits for the device"
    ]


def test_sizes_that_run_out_of_memory_are_not_recorded_and_smaller_ones_are(
    model, prompts, monkeypatch, recorded, caplog
):
    expected = run(Engine(model, EngineConfig(enforce_eager=True)), prompts, max_tokens=30, ignore_eos=True)
    engine, tried = Engine(model, EngineConfig(kv_block_size=16)), []
    plain = CPU.record

    def lacking(work):
        tried.append(len(tried))
        if len(tried) == 1:  # the first recording has three sequences, padded to four
            raise torch.OutOfMemoryError("lacking")
        return plain(work)

    monkeypatch.setattr(CPU, "record", lacking)
    assert run(engine, prompts, max_tokens=30, ignore_eos=True) == expected
    assert not recorded, "after a failure, no larger size is recorded"
    assert len(tried) == 1
    alone = run(Engine(model, EngineConfig(enforce_eager=True)), prompts[:1], max_tokens=30, ignore_eos=True)
    assert run(engine, prompts[:1], max_tokens=30, ignore_eos=True) == alone
    assert sum(recorded) == 29
    (warning,) = [record.message for record in caplog.records if "recorded" in record.message]
    assert warning.startswith("decode steps of ")
    assert warning.endswith(
        " KV cache slots or more cannot be recorded as graphs, so each operator is launched separately: lacking"
    )


def test_graphs_are_refused_with_collectives_on_vector_cores(monkeypatch):
    """CANN fails to capture such collectives, or waits forever in a launch."""
    assert decode_graphs.captures_graphs(NPU, EngineConfig())
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
    with pytest.raises(DeviceError, match="Unset it, or pass --enforce-eager"):
        decode_graphs.captures_graphs(NPU, EngineConfig())
    assert not decode_graphs.captures_graphs(NPU, EngineConfig(enforce_eager=True))


def test_long_sequences_are_not_recorded(model, prompts, monkeypatch, recorded):
    monkeypatch.setattr(decode_graphs, "MOST_SLOTS", 64)
    run(Engine(model, EngineConfig(kv_block_size=16)), prompts[:1], max_tokens=100, ignore_eos=True)
    length = len(prompts[0])
    assert sum(recorded) == 64 - length
    assert np.count_nonzero(recorded) == len(recorded)


def test_a_graph_that_computes_nothing_is_not_used(model, prompts, recorded, monkeypatch, caplog):
    def record_nothing(_, work):
        work()
        return lambda lengths: None

    expected = run(Engine(model, EngineConfig(enforce_eager=True)), prompts, max_tokens=8, ignore_eos=True)
    monkeypatch.setattr(CPU, "record", classmethod(record_nothing))
    assert run(Engine(model, EngineConfig()), prompts, max_tokens=8, ignore_eos=True) == expected
    assert "logits differ" in caplog.text


def test_a_first_step_with_more_rows_than_a_graph_is_computed_without_one(model, prompts, recorded, monkeypatch):
    """True if attention gathers is learned from the first decode step, whatever its size."""
    expected = run(Engine(model, EngineConfig(enforce_eager=True)), prompts, max_tokens=8, ignore_eos=True)
    monkeypatch.setattr(Kernels, "attends_in_graphs", True)
    monkeypatch.setattr(decode_graphs, "MOST_SLOTS", 32)
    engine = Engine(model, EngineConfig(kv_block_size=16, max_num_seqs=16, prefix_caching=False))
    assert engine._runner._graphs._gathers is None
    assert run(engine, prompts, max_tokens=8, ignore_eos=True) == expected
    assert engine._runner._graphs._gathers


@pytest.mark.parametrize("chunk_size", [None, 64])
def test_graphs_of_layers_with_chunks_have_the_limit_of_gathering(model, chunk_size, monkeypatch):
    """A step beyond the first chunk gathers, even if the first step, which is within the first chunk, does not."""
    monkeypatch.setattr(Kernels, "attends_in_graphs", True)
    layers = tuple(replace(layer, chunk_size=chunk_size) for layer in model.spec.layers)
    monkeypatch.setattr(model, "spec", replace(model.spec, layers=layers))
    graphs = decode_graphs.DecodeGraphs(model, model.spec.allocate_cache(4, 16), max_num_seqs=2)
    assert graphs._gathers is (None if chunk_size is None else True)
    assert graphs._most_slots == decode_graphs.MOST_SLOTS
