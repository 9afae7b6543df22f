"""Tests for LoRA adapters in engines and in `LLM`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from mindie_mm import LLM, BeamSearchParams, SamplingParams
from mindie_mm.device import open_device
from mindie_mm.engine.core import Engine
from mindie_mm.engine.process.largest_step import WorstCase
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.errors import InputError, ModelNotFound, OperationalError
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import EMBEDDED, Checkpoint
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.content import contents_of
from mindie_mm.worker.deltas import Answer
from mindie_mm.worker.worker import Worker
from tests.lora_samples import assert_close, linear_names, merge, scored, write_adapter
from tests.models.contract import noise

pytestmark = pytest.mark.usefixtures("copied_workers")

CPU = EngineConfig(device="cpu", dtype="float32", max_lora_rank=8)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
IDS = [*range(100, 160)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Return the folders of four adapters of the embedded checkpoint. The first changes towers, too."""
    plain = load_model(None, "cpu", "float32", prepares=False)
    names = linear_names(plain.module)
    text = [name for name in names if "language_model" in name]
    path = tmp_path_factory.mktemp("loras")
    return {
        "everything": write_adapter(path / "everything", plain.module, names),
        **{f"text {seed}": write_adapter(path / str(seed), plain.module, text, seed=seed) for seed in (1, 2, 3)},
    }


@pytest.fixture(scope="module")
def expected(folders) -> dict[str | None, list[int]]:
    """Return the tokens after `IDS` of models with merged weights, by the name of the adapter."""
    found = {}
    for name, folder in {None: None, **folders}.items():
        model = load_model(None, "cpu", "float32", prepares=False)
        if folder is not None:
            merge(model.module, folder)
        ((found[name], _),) = scored(Engine(model, CPU, 2**24), [(torch.tensor(IDS), None)], max_tokens=8)
    assert len({tuple(tokens) for tokens in found.values()}) == 5
    return found


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(config=WorkerConfig(engine=CPU), loras=folders) as llm:
        yield llm


def test_requests_with_several_adapters_and_none_share_a_batch(llm, folders, expected):
    names = [*folders, None, "text 1", None]
    outputs = llm.generate([IDS] * len(names), GREEDY, lora=names)
    assert [output.token_ids for output in outputs] == [expected[name] for name in names]


@pytest.mark.parametrize("name", [None, "everything", "text 2"])
def test_the_adapter_of_the_parameters_or_of_the_call_applies(name, llm, expected):
    in_params = llm.generate(IDS, msgspec.structs.replace(GREEDY, lora=name))
    assert in_params[0].token_ids == llm.generate(IDS, GREEDY, lora=name)[0].token_ids == expected[name]
    streamed = [token for part in llm.stream(IDS, GREEDY, lora=name) for token in part.token_ids]
    (beams,) = llm.beam_search(IDS, BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True), lora=name)
    assert streamed == beams.sequences[0].tokens == expected[name]


def test_an_image_is_encoded_once_for_each_adapter_of_the_tower(llm):
    prompt = [{"image": Image.fromarray(noise(60, 90))}, {"text": "What?"}]
    names = [None, "everything", "text 1", "text 2"]
    alone = [llm.generate([prompt], GREEDY, lora=name)[0].token_ids for name in names]
    together = llm.generate([prompt] * 8, GREEDY, lora=names * 2)
    assert [output.token_ids for output in together] == alone * 2
    assert llm.chat([{"role": "user", "content": "Hi"}], GREEDY, lora="text 3").token_ids


def test_the_prefix_cache_separates_adapters(llm):
    ids = [*range(200, 264)]
    cached = [llm.generate(ids, GREEDY, lora=name)[0].cached_tokens for name in (None, "text 1", "text 2", "text 1")]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] >= 48


def test_unknown_names_and_wrong_arguments_are_refused(llm):
    with pytest.raises(ModelNotFound, match="the LoRA adapter 'sql' does not exist; those loaded are 'everything'"):
        llm.generate("Hi", GREEDY, lora="sql")
    with pytest.raises(InputError, match="lora has 1 names for 2 inputs"):
        llm.generate(["Hi", "Ho"], GREEDY, lora=["text 1"])
    with pytest.raises(InputError, match="must be the name of an adapter, or a list"):
        llm.generate("Hi", GREEDY, lora=3)
    with pytest.raises(InputError, match="as an element; it must be the name of an adapter or None"):
        llm.generate("Hi", GREEDY, lora=[3])


@pytest.mark.parametrize(
    ("loras", "message"),
    [
        (["a"], "must be a dict"),
        ({"": "/tmp"}, "must have 1 to 256 printable characters"),
        ({" a": "/tmp"}, "no space at its ends"),
        ({"a=b": "/tmp"}, "no = and"),
        ({"a\nb": "/tmp"}, "printable characters"),
        ({"a": "/nowhere"}, "/nowhere is not a folder"),
        ({"a": EMBEDDED}, "is a checkpoint, not an adapter"),
    ],
)
def test_wrong_adapters_are_refused_at_the_start(loras, message):
    with pytest.raises(InputError, match=message):
        LLM(config=WorkerConfig(engine=CPU), loras=loras)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (("sql",), "lora='sql' must be NAME=FOLDER, such as sql="),
        (("sql=",), "must be NAME=FOLDER"),
        (("sql=/a", "sql=/b"), "lora gives the name 'sql' twice"),
    ],
)
def test_settings_of_adapters_are_checked(lora, message):
    with pytest.raises(InputError, match=message):
        WorkerConfig(lora=lora)


def test_more_adapters_than_places_take_turns_and_others_need_not_wait(folders, expected):
    model = load_model(None, "cpu", "float32")
    loras = model.enable_loras(1, 8)
    adapters = {name: loras.read(folder) for name, folder in folders.items()}
    loras.known = {adapter.key: adapter for adapter in adapters.values()}
    engine = Engine(model, EngineConfig(max_loras=1), 2**24)
    names = [*folders, None, *folders, None]
    requests = [(torch.tensor(IDS), None if name is None else adapters[name].key) for name in names]
    found = scored(engine, requests, max_tokens=8)
    assert [tokens for tokens, _ in found] == [expected[name] for name in names]
    assert loras.num_placed == 1
    assert_close(found[:4], found[5:9])


def test_an_urgent_request_without_a_place_for_its_adapter_preempts_nothing(folders):
    model = load_model(None, "cpu", "float32")
    loras = model.enable_loras(1, 8)
    adapters = [loras.read(folders[name]) for name in ("text 1", "text 2")]
    loras.known = {adapter.key: adapter for adapter in adapters}
    engine = Engine(model, EngineConfig(max_loras=1, max_num_seqs=2), 2**24)

    def add(name: str, lora: str | None, priority: int) -> None:
        params = msgspec.structs.replace(GREEDY, lora=lora, priority=priority)
        assert engine.add(Add(name, np.array(IDS).tobytes(), params)) is None

    add("adapted", adapters[0].key, 0)
    add("plain", None, 5)
    ended = [one.request_id for one in engine.step().progress if one.finish_reason]
    add("urgent", adapters[1].key, -1)
    while engine.has_work():
        ended += [one.request_id for one in engine.step().progress if one.finish_reason]
    assert ended[-1] == "urgent"
    assert len(ended) == 3
    assert engine.stats.preemptions == 0


@pytest.mark.slow
def test_memory_is_reserved_for_adapters(folders):
    async def step_bytes(lora: tuple[str, ...], max_loras: int) -> int:
        engine = EngineConfig(device="cpu", dtype="float32", max_lora_rank=8, max_loras=max_loras)
        async with await Worker.start(WorkerConfig(engine=engine, lora=lora), in_process=True) as worker:
            return worker.engine.info.step_bytes

    async def measured() -> list[int]:
        lora = (f"a={folders['everything']}",)
        return [await step_bytes((), 4), await step_bytes(lora, 1), await step_bytes(lora, 3)]

    without, one, three = asyncio.run(measured())
    assert one - without >= (three - one) // 2 > 0


def test_the_largest_step_contains_the_temporary_tensors_of_adapters():
    checkpoint = Checkpoint.open(None)
    processor = family_of(checkpoint).processor(checkpoint)
    config = EngineConfig(max_model_len=64, max_num_seqs=1)  # so that the linear layers take the most memory

    def step_bytes(rank: int) -> int:
        model = load_model(None, "cpu", "float32")
        if rank:
            model.enable_loras(4, rank)
        return WorstCase(model, processor, open_device("cpu"), config).step(()).num_bytes

    without, small, large = map(step_bytes, (0, 1, 512))
    assert without < small < large


@pytest.fixture
async def worker(request, folders, tmp_path):
    copies = {name: shutil.copytree(folder, tmp_path / name) for name, folder in folders.items()}
    lora = tuple(f"{name}={copies[name]}" for name in ("everything", "text 1"))
    engine = replace(CPU, tensor_parallel=getattr(request, "param", 1))
    async with await Worker.start(WorkerConfig(engine=engine, lora=lora), in_process=True) as worker:
        await worker.loras.load("text 2", copies["text 2"])
        yield worker


with_ranks = pytest.mark.parametrize(
    "worker",
    [
        pytest.param(1, id="one rank"),
        pytest.param(2, id="two ranks", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
    indirect=True,
)


def kill(worker: Worker) -> None:
    """Kill the engine, or the last of its ranks."""
    engine = psutil.Process(worker.engine.pid)
    (engine.children(recursive=True) or [engine])[-1].kill()


async def tokens_of(worker: Worker, name: str | None) -> list[int]:
    params = msgspec.structs.replace(GREEDY, lora=name)
    return (await worker.whole_answer(torch.tensor(IDS), params, f"request {name}")).token_ids


@with_ranks
async def test_adapters_survive_the_death_of_the_engine(worker, expected, folders, tmp_path):
    names = ("everything", "text 1", "text 2", None)
    kill(worker)
    assert [await tokens_of(worker, name) for name in names] == [expected[name] for name in names]
    params = msgspec.structs.replace(GREEDY, lora="text 2", max_tokens=40)
    answer = Answer()
    async with aclosing(worker.answer(torch.tensor(IDS), params, "disturbed")) as deltas:
        async for delta in deltas:
            answer.add(delta)
            if len(answer.token_ids) == 4:
                kill(worker)
    assert answer.token_ids[:8] == expected["text 2"]
    assert len(answer.token_ids) == 40
    shutil.rmtree(tmp_path / "text 1")  # other files in place of those that were loaded
    shutil.copytree(folders["text 3"], tmp_path / "text 1")
    kill(worker)
    with pytest.raises(OperationalError, match="its files have changed; unload it, and load it again"):
        await tokens_of(worker, "text 1")
    assert await tokens_of(worker, "text 2") == expected["text 2"]
    await worker.loras.unload("text 1")
    await worker.loras.load("text 1", tmp_path / "text 1")
    assert await tokens_of(worker, "text 1") == expected["text 3"]


async def test_an_adapter_that_is_unloaded_finishes_its_requests(worker, expected, tmp_path):
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def answer() -> list[int]:
        found = Answer()
        params = msgspec.structs.replace(GREEDY, lora="text 1")
        async with aclosing(worker.answer(torch.tensor(IDS), params, "long")) as deltas:
            async for delta in deltas:
                found.add(delta)
                begun.set()
                await goes_on.wait()
        return found.token_ids

    running = asyncio.create_task(answer())
    await begun.wait()
    await worker.loras.unload("text 1")
    with pytest.raises(ModelNotFound):
        await tokens_of(worker, "text 1")
    kill(worker)  # the next engine must know the adapter, although it has no name
    goes_on.set()
    assert await running == expected["text 1"]
    await worker.loras.load("text 1", tmp_path / "text 2")
    assert await tokens_of(worker, "text 1") == expected["text 2"]


async def test_a_request_keeps_its_adapter_when_another_one_replaces_it(worker, expected, tmp_path):
    params = msgspec.structs.replace(GREEDY, lora="text 1")
    async with worker.prompt(torch.tensor(IDS), params) as source:
        await worker.loras.load("text 1", tmp_path / "text 3", replaces=True)
        assert (await worker.generate_whole(source, params, "old")).token_ids == expected["text 1"]
    assert await tokens_of(worker, "text 1") == expected["text 3"]


async def test_an_engine_that_starts_learns_what_was_loaded_and_unloaded_meanwhile(worker, expected, tmp_path):
    """With several engines, the others load and unload adapters while one of them starts."""
    await worker.loras.load("text 3", tmp_path / "text 3")
    keys = {one.name: one.key for one in worker.loras}
    await worker.loras.unload("text 3")
    engine, died = worker.engine, worker.engine.pid
    os.kill(died, signal.SIGKILL)
    while engine.pid == died:  # noqa: ASYNC110 - nothing is set between the start of a process and its readiness
        await asyncio.sleep(0.01)
    assert not engine.up
    engine.load_lora_later(tmp_path / "text 3", keys["text 3"])
    engine.keep_loras([keys["text 3"], keys["everything"]])

    async def tokens(name: str) -> list[int]:
        params = msgspec.structs.replace(GREEDY, lora=keys[name])
        async with aclosing(engine.generate(name, np.array(IDS), params)) as steps:
            return [token async for step in steps for token in step.token_ids]

    assert [await tokens(name) for name in ("text 3", "everything")] == [expected["text 3"], expected["everything"]]
    with pytest.raises(OperationalError):
        await tokens("text 1")


@with_ranks
async def test_loading_and_unloading_lose_no_request_and_leave_no_adapter_behind(worker, expected, tmp_path):
    async def many(name: str | None) -> list[list[int]]:
        params = msgspec.structs.replace(GREEDY, lora=name)
        answers = [worker.whole_answer(torch.tensor(IDS), params, f"{name} {number}") for number in range(4)]
        return [answer.token_ids for answer in await asyncio.gather(*answers)]

    asked = [asyncio.create_task(many(name)) for name in ("everything", "text 1", None)]
    for _ in range(3):
        await worker.loras.load("again", tmp_path / "text 3")
        assert await tokens_of(worker, "again") == expected["text 3"]
        await worker.loras.unload("again")
    assert [await one for one in asked] == [[expected[name]] * 4 for name in ("everything", "text 1", None)]
    with pytest.raises(InputError, match="The lora adapter 'text 1' has already been loaded"):
        await worker.loras.load("text 1", tmp_path / "text 3")
    with pytest.raises(InputError, match="is not a folder"):
        await worker.loras.load("new", tmp_path / "nowhere")
    assert "new" not in worker.loras
    with pytest.raises(ModelNotFound):
        await worker.loras.unload("new")
    with worker.loras.use("text 1") as key:
        ends = [worker.loras.unload("text 1"), worker.loras.unload("text 1")]
        assert [type(one) for one in await asyncio.gather(*ends, return_exceptions=True)] == [type(None), ModelNotFound]
        failing = asyncio.create_task(worker.loras.load("new", tmp_path / "nowhere"))
        await asyncio.sleep(0)
    assert key in {one.key for one in worker.engine._start.loras}
    with pytest.raises(InputError, match="is not a folder"):
        await failing
    assert {one.key for one in worker.engine._start.loras} == {one.key for one in worker.loras}


def test_requests_with_different_adapters_have_no_prefix_in_common():
    ids = np.arange(256)
    keys = [contents_of(ids, "", lora).first_key for lora in (None, "a", "b", "a")]
    assert keys[1] == keys[3]
    assert len({*keys}) == 3


@pytest.mark.slow
async def test_all_replicas_load_an_adapter_and_keep_it(folders, expected):
    lora = (f"everything={folders['everything']}",)
    config = WorkerConfig(engine=CPU, lora=lora, replicas=2)
    async with await Worker.start(config, in_process=True) as worker:
        await worker.loras.load("text 1", folders["text 1"])
        with pytest.raises(InputError, match="is not a folder"):
            await worker.loras.load("text 2", folders["text 1"] / "nowhere")
        names = ["everything", "text 1", None] * 4
        for _ in range(2):
            answers = [
                worker.whole_answer(torch.tensor(IDS), msgspec.structs.replace(GREEDY, lora=name), f"{number}")
                for number, name in enumerate(names)
            ]
            found = await asyncio.gather(*answers)
            assert [one.token_ids for one in found] == [expected[name] for name in names]
            os.kill(worker.engine.engines[0].pid, signal.SIGKILL)
        await worker.loras.unload("text 1")
        with pytest.raises(ModelNotFound):
            await tokens_of(worker, "text 1")


@pytest.mark.slow
async def test_no_engine_keeps_an_adapter_that_one_of_them_cannot_load(folders, expected, tmp_path, monkeypatch):
    """The files disappear after the first of two engines has loaded them, and before the second one reads them."""
    config = WorkerConfig(engine=CPU, lora=(f"text 1={folders['text 1']}",), replicas=2)
    async with await Worker.start(config, in_process=True) as worker:
        first, second = worker.engine.engines
        keys = []

        async def load_and_remove(folder: Path, key: str = "") -> str:
            keys.append(await AsyncEngine.load_lora(first, folder, key))
            shutil.rmtree(folder)
            return keys[0]

        with monkeypatch.context() as patch:
            patch.setattr(first, "load_lora", load_and_remove)
            with pytest.raises(InputError, match="is not a folder"):
                await worker.loras.load("new", shutil.copytree(folders["text 2"], tmp_path / "new"))
        assert "new" not in worker.loras
        params = msgspec.structs.replace(GREEDY, lora=keys[0])
        for engine in (first, second):
            assert [one.folder for one in engine._start.loras] == [str(folders["text 1"])]
            with pytest.raises(OperationalError, match="could not be read again"):
                async for _ in engine.generate("lost", np.array(IDS), params):
                    pass
        await worker.loras.load("new", shutil.copytree(folders["text 2"], tmp_path / "new"))
        answers = await asyncio.gather(*(tokens_of(worker, name) for name in ("new", "text 1", None)))
        assert answers == [expected["text 2"], expected["text 1"], expected[None]]
