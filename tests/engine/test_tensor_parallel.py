"""Tests for an engine with two ranks: the same tokens as with one rank, and a joint restart of all processes."""

import asyncio
import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from typing import get_args

import numpy as np
import psutil
import pytest
import torch

from mindie_mm.engine.core import Engine
from mindie_mm.engine.ranks import Ranks
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import (
    BadReference,
    ContextLengthExceeded,
    DeviceError,
    InputError,
    ProcessDied,
    UnsupportedCheckpoint,
)
from mindie_mm.inputs import Embeddings
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig, TowerParallel
from mindie_mm.shm import release
from mindie_mm.structured.grammar import Grammars
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from mindie_mm.worker.async_engine import AsyncEngine
from tests.engine.conftest import STEP_TIMEOUT_S
from tests.engine.shared_model import NUM_TOKENS, run_rank, with_adapters
from tests.lora_samples import assert_close, linear_names, write_adapter
from tests.models.contract import noise, run
from tests.removed_arenas import removed_arenas

pytestmark = pytest.mark.timeout(300)  # an engine has three processes, which share the available cores

TWO = EngineConfig(device="cpu", tensor_parallel=2, tower_parallel="items", kv_cache_bytes=2**22)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
PROMPT = np.arange(10, 40, dtype=np.int64)
PROMPTS = {
    "text": [{"text": "Describe this picture."}],
    "one": [{"image": noise(60, 90)}, {"text": "What is in the image?"}],
    "two": [{"image": noise(60, 90)}, {"image": noise(150, 60)}, {"text": "a circle"}],
    "three": [{"image": noise(60, 90, seed)} for seed in (1, 2, 3)],
}


@pytest.fixture(scope="module")
def model(random_checkpoint):
    return load_model(random_checkpoint, "cpu", "float32")


@pytest.fixture
def prompts(random_checkpoint, tmp_path):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        yield {name: tokenizer.tokenize(items, tmp_path / name).numpy() for name, items in PROMPTS.items()}
        for name in PROMPTS:
            release(tmp_path / name)


@pytest.fixture(scope="module")
async def engine(random_checkpoint, copied_workers):
    engine = await AsyncEngine.start(random_checkpoint, TWO)
    processes = everything(engine)
    assert len(processes) == 3
    yield engine
    processes = everything(engine)
    await engine.close()
    assert_gone(processes)


def everything(engine):
    """Return the processes of the engine: the launcher and its descendants."""
    launcher = psutil.Process(engine.pid)
    return [launcher, *launcher.children(recursive=True)]


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=300)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


async def tokens(engine, request_id, ids=PROMPT, params=GREEDY):
    return [token async for progress in engine.generate(request_id, ids, params) for token in progress.token_ids]


async def test_two_ranks_give_the_tokens_of_one_process(engine, model, prompts):
    ids = [torch.from_numpy(prompt) for prompt in prompts.values()]
    outputs, errors = run(Engine(model, EngineConfig()), ids, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert not errors
    found = await asyncio.gather(*(tokens(engine, name, ids) for name, ids in prompts.items()))
    assert found == [*outputs.values()]
    again = await asyncio.gather(*(tokens(engine, name, ids) for name, ids in prompts.items()))
    assert again == found, "tokens from cached features and prefixes are the same"
    assert engine.stats.prefix_cache_hits > 0


@pytest.mark.parametrize("mode", ["last", "mean"])
async def test_two_ranks_pool_the_states_of_one_process(engine, model, prompts, mode):
    params = SamplingParams(max_tokens=0, pooling=mode)
    one = Engine(model, EngineConfig())
    for name, ids in prompts.items():
        assert one.add(Add(name, ids.tobytes(), params)) is None
        expected = []
        while one.has_work():
            expected += [np.frombuffer(progress.pooled, np.float32) for progress in one.step().progress]
        found = [progress.pooled async for progress in engine.generate(name, ids, params)]
        np.testing.assert_allclose(np.frombuffer(b"".join(found), np.float32), np.concatenate(expected), atol=1e-4)


async def test_every_rank_unmaps_a_removed_arena(engine, random_checkpoint, tmp_path):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        ids = tokenizer.tokenize(PROMPTS["two"], tmp_path / "path").numpy()
        await tokens(engine, "images", ids)
        release(tmp_path / "path")
    assert removed_arenas([process.pid for process in everything(engine)]) == set()


async def test_a_seed_repeats_its_tokens_and_requests_without_a_seed_differ(engine):
    seeded = SamplingParams(temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    first, second, *others = await asyncio.gather(
        *(tokens(engine, f"{i}", PROMPT, params) for i, params in enumerate([seeded, seeded, drawn, drawn, drawn]))
    )
    assert first == second
    assert all(len(found) == 12 for found in others)
    assert len({tuple(found) for found in others}) == 3, "each request without a seed has its own random seed"


async def test_all_ranks_give_answers_that_fit_the_schema(engine, model, random_checkpoint):
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]})
    one = Engine(model, EngineConfig())
    one.grammars = Grammars(load_tokenizer(Checkpoint.open(random_checkpoint)), model.spec.eos_token_ids)
    outputs, errors = run(one, [torch.from_numpy(PROMPT)], max_tokens=16, json_schema=schema)
    assert not errors
    params = SamplingParams(temperature=0, max_tokens=16, json_schema=schema)
    assert await tokens(engine, "schema", PROMPT, params) == outputs[0]
    with pytest.raises(InputError, match="not valid JSON"):
        await tokens(engine, "none", PROMPT, SamplingParams(json_schema="{"))
    assert await tokens(engine, "again", PROMPT, params) == outputs[0]


async def test_a_failed_request_does_not_affect_other_requests(engine, prompts, tmp_path):
    release(tmp_path / "two")
    long = np.full(9000, 5)
    good, stale, broken, much = await asyncio.gather(
        *(
            tokens(engine, name, ids)
            for name, ids in {"a": prompts["one"], "b": prompts["two"], "c": np.array([5, -7]), "d": long}.items()
        ),
        return_exceptions=True,
    )
    assert len(good) == NUM_TOKENS
    assert isinstance(stale, BadReference)
    assert isinstance(broken, BadReference)
    assert isinstance(much, ContextLengthExceeded)
    assert await tokens(engine, "e", prompts["one"]) == good


async def test_an_item_that_fails_on_one_rank_fails_only_its_request(engine, random_checkpoint, prompts, tmp_path):
    """The request has embeddings of another model. Only the rank that reads them can refuse them."""
    other = tmp_path / "other"
    shutil.copytree(random_checkpoint, other, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["hidden_size"] = 128
    (other / "config.json").write_text(json.dumps(config))
    item = {"image": Embeddings(np.zeros((4, 128), np.float32), (1, 4, 4))}
    with Tokenizer.from_pretrained(other) as tokenizer:
        wrong = tokenizer.tokenize([item], tmp_path / "wrong").numpy()
        good, bad = await asyncio.gather(
            tokens(engine, "good", prompts["three"]), tokens(engine, "bad", wrong), return_exceptions=True
        )
        release(tmp_path / "wrong")
    assert len(good) == NUM_TOKENS
    assert isinstance(bad, BadReference)
    assert "have width 128; the model needs 64" in str(bad)


async def test_leaving_the_stream_early_aborts_on_all_ranks(engine):
    stream = engine.generate("left", PROMPT, ENDLESS)
    async for _ in stream:
        break
    await stream.aclose()
    async with asyncio.timeout(300):
        while engine.stats.num_running or engine.stats.kv_cache_usage:  # noqa: ASYNC110 - no event announces this
            await asyncio.sleep(0)
    assert len(await tokens(engine, "next")) == NUM_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_killed_process_restarts_all_processes(engine, which):
    right = await tokens(engine, "before")
    processes = everything(engine)
    stream = engine.generate("running", PROMPT, ENDLESS)
    await anext(stream)
    processes[which].kill()
    with pytest.raises(ProcessDied, match=f"engine process {processes[0].pid} died"):
        async for _ in stream:
            pass
    assert_gone(processes)
    assert await tokens(engine, "after") == right, "a later request waits for the new processes"
    assert not {process.pid for process in everything(engine)} & {process.pid for process in processes}


@pytest.mark.slow
async def test_a_rank_that_hangs_restarts_all_ranks(random_checkpoint, periods):
    engine = await AsyncEngine.start(random_checkpoint, dataclasses.replace(TWO, step_timeout_s=STEP_TIMEOUT_S))
    try:
        right, processes = await tokens(engine, "before"), everything(engine)
        processes[2].suspend()
        hung = asyncio.create_task(tokens(engine, "hung"))
        await periods.passed(2)
        message = f"engine process {processes[0].pid} made no progress for {STEP_TIMEOUT_S:g} s"
        with pytest.raises(ProcessDied, match=message):
            await hung
        assert_gone(processes)
        assert await tokens(engine, "after") == right
    finally:
        await engine.close()


OWNER = """
import asyncio, sys
from pathlib import Path
from mindie_mm.settings.config import EngineConfig
from mindie_mm.worker.async_engine import AsyncEngine
import psutil
async def main():
    engine = await AsyncEngine.start(Path(sys.argv[1]), EngineConfig(device="cpu", tensor_parallel=2))
    launcher = psutil.Process(engine.pid)
    print(*(process.pid for process in [launcher, *launcher.children(recursive=True)]), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.slow
def test_all_processes_end_when_the_service_is_killed(random_checkpoint):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(random_checkpoint)], stdout=subprocess.PIPE, text=True
    ) as owner:
        processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(processes) == 3
    assert_gone(processes)


SHARED = ("gemma3", "gemma4", "lfm2_vl", "qwen2_5_omni", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
ALSO_SHARED = (
    "aria",
    "deepseek_ocr2",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "ernie4_5_vl_moe",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "hunyuan_vl",
    "idefics3",
    "internvl",
    "kimi_k25",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "minicpmv4_6",
    "minicpmv4_7",
    "mistral3",
    "ovis2",
    "paddleocr_vl",
    "pixtral",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "smolvlm",
    "step3p7",
)
REFUSED = ("blip_2", "chameleon", "florence2", "fuyu", "molmo2", "phi4_multimodal")


def contract_of(name):
    """Return an instance of the family's test class.

    If this module imported the class by name, pytest would collect its tests here, too.
    """
    module = importlib.import_module(f"tests.models.test_{name}")
    classes = (value for value in vars(module).values() if isinstance(value, type))
    return next(found() for found in classes if getattr(found, "name", None) == name)


def shared(cases):
    """Run the `cases` on two ranks."""
    torch.multiprocessing.spawn(run_rank, (2, cases, "cpu"), nprocs=2)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SHARED, ALSO_SHARED], ids=["some", "others"])
def test_families_give_the_same_logits_and_tokens_on_two_ranks(tmp_path, names):
    cases, prompts = tmp_path / "cases", {}
    with ExitStack() as stack:
        for name in names:
            contract, case = contract_of(name), cases / name
            case.mkdir(parents=True)
            (path := tmp_path / name).mkdir()
            contract.write_checkpoint(path)
            (case / "path").write_text(str(path))
            tokenizer = stack.enter_context(Tokenizer.from_pretrained(path))
            path_file = tmp_path / f"{name}.shm"
            stack.callback(release, path_file)
            for prompt, items in contract.prompts.items():
                prompts[name, prompt] = contract.tokenize(tokenizer, prompt, items, path_file)
                np.save(case / prompt, prompts[name, prompt].numpy())
        shared(cases)
        for name in names:
            model, case = load_model(tmp_path / name, "cpu", "float32"), cases / name
            own = {prompt: prompts[name, prompt] for prompt in sorted(contract_of(name).prompts)}
            outputs, _ = run(Engine(model, EngineConfig()), [*own.values()], max_tokens=NUM_TOKENS)
            for rank in (0, 1):
                for prompt, ids in own.items():
                    logits = np.load(case / f"{prompt}.{rank}.logits.npy")
                    assert np.abs(logits - model.logits(ids).numpy()).max() <= 1e-4, (name, prompt)
                for way in get_args(TowerParallel):
                    found = json.loads((case / f"{way}.{rank}.json").read_text())
                    assert found == dict(zip(own, outputs.values(), strict=True)), (name, way)


def write_adapters(folder, model):
    """Write adapters of all linear layers, with magnitudes, and with biases and whole embeddings and output layers."""
    module, names = model.module, linear_names(model.module)
    text = {part for one in model.text_modules() for part in one.modules()}
    in_text = [name for name in names if module.get_submodule(name) in text]
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    whole = [name for name, part in module.named_modules() if part in ends]
    write_adapter(folder / "a", module, names)
    write_adapter(folder / "b", module, in_text, seed=1, rank=8, use_dora=True)
    write_adapter(folder / "c", module, in_text, seed=2, lora_bias=True, whole=whole)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SHARED, ALSO_SHARED], ids=["some", "others"])
def test_families_apply_adapters_on_two_ranks(tmp_path, names):
    cases, prompts = tmp_path / "cases", {}
    with ExitStack() as stack:
        for name in names:
            contract, case = contract_of(name), cases / name
            case.mkdir(parents=True)
            (path := tmp_path / name).mkdir()
            contract.write_checkpoint(path)
            (case / "path").write_text(str(path))
            write_adapters(case / "loras", load_model(path, "cpu", "float32", prepares=False))
            tokenizer = stack.enter_context(Tokenizer.from_pretrained(path))
            path_file = tmp_path / f"{name}.shm"
            stack.callback(release, path_file)
            prompt, items = [*contract.prompts.items()][-1]
            prompts[name] = contract.tokenize(tokenizer, prompt, items, path_file)
            np.save(case / prompt, prompts[name].numpy())
        shared(cases)
        for name in names:
            model = load_model(tmp_path / name, "cpu", "float32")
            expected = with_adapters(model, cases / name / "loras", [prompts[name]])
            assert len({str(tokens) for tokens, _ in expected}) > 1, name
            first, second = (json.loads((cases / name / f"loras.{rank}.json").read_text()) for rank in (0, 1))
            assert_close(first, expected)
            assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]  # rank 0 has the probabilities


@pytest.mark.slow
def test_checkpoints_that_cannot_be_sharded_are_refused(tmp_path, random_checkpoint):
    cases = tmp_path / "cases"
    for name in REFUSED:
        (path := tmp_path / name).mkdir()
        contract_of(name).write_checkpoint(path)
        (cases / name).mkdir(parents=True)
        (cases / name / "path").write_text(str(path))
    shutil.copytree(random_checkpoint, tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    config["text_config"]["num_key_value_heads"] = 1
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config))
    shutil.copytree(random_checkpoint, tmp_path / "quantised")
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    for name in ("heads", "quantised"):
        (cases / name).mkdir()
        (cases / name / "path").write_text(str(tmp_path / name))
    shared(cases)
    for rank in (0, 1):
        refusals = {case.name: (case / f"refused.{rank}.txt").read_text() for case in cases.iterdir() if case.is_dir()}
        assert all(re.search(r"tensor_parallel (is 2|\(2\))", words) for words in refusals.values()), refusals
        assert "1 key-value heads" in refusals["heads"]


@pytest.mark.slow
async def test_starting_raises_an_error_of_the_ranks(tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match=r"no config\.json"):
        await AsyncEngine.start(tmp_path, TWO)


@pytest.mark.parametrize("settings", [{"tensor_parallel": 0}, {"tower_parallel": "layers"}])
def test_invalid_parallel_settings_are_refused(settings):
    with pytest.raises(InputError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_items_are_balanced_over_the_ranks():
    ranks = Ranks()
    ranks.count = 3
    assert ranks.owners([]) == []
    assert ranks.owners([5, 5, 5, 5]) == [0, 1, 2, 0]
    assert ranks.owners([1, 9, 4, 4, 1]) == [1, 0, 1, 2, 2]


FAILING = """
import sys
from datetime import timedelta
if "mindie_mm.engine.process.rank" in sys.orig_argv:
    import torch
    import torch.distributed as dist
    from mindie_mm.engine import ranks
    from {module} import {owner}

    def failing(*_, **__):
        if dist.get_rank() == 0:
            dist.barrier()  # as in a layer whose results the ranks sum
        raise torch.OutOfMemoryError("no more")

    {owner}.{method} = failing
    ranks.Ranks.run_on_all.__defaults__ = (timedelta(seconds=1),)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "owner", "method", "message"),
    [
        ("mindie_mm.device.cpu", "CPU", "peak_bytes", "fails on cpu: no more"),
        ("mindie_mm.nn.weights.pretrained", "PretrainedModel", "fuse", "does not fit in the memory of cpu: no more"),
    ],
    ids=["the largest step", "a trial of layers"],
)
async def test_a_failure_on_one_rank_ends_the_start_on_both(
    random_checkpoint, tmp_path, monkeypatch, module, owner, method, message
):
    """The other rank may wait for the failed rank in a collective operation, and cannot receive its error."""
    (tmp_path / "sitecustomize.py").write_text(FAILING.format(module=module, owner=owner, method=method))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    settings = dataclasses.replace(TWO, kv_cache_bytes=None)
    async with asyncio.timeout(200):
        with pytest.raises(DeviceError, match=message):
            await AsyncEngine.start(random_checkpoint, settings)


@pytest.mark.slow
async def test_a_cache_that_is_too_small_is_logged_once_and_refused_on_both(random_checkpoint, model, capfd):
    num_bytes = 5 * 16 * model.spec.kv_token_bytes // 2  # each rank stores half of the heads
    small = dataclasses.replace(TWO, kv_block_size=16, kv_cache_bytes=num_bytes)
    engine = await AsyncEngine.start(random_checkpoint, small)
    try:
        assert engine.info.max_model_len == 80
    finally:
        await engine.close()
    log = capfd.readouterr().err
    assert log.count(f"the KV cache holds 80 tokens in {num_bytes} bytes; the context length is 80") == 1
    assert log.count("Longer requests are refused") == 1
    async with asyncio.timeout(200):
        with pytest.raises(DeviceError, match="a context of 81 tokens needs"):
            await AsyncEngine.start(random_checkpoint, dataclasses.replace(small, max_model_len=81))
