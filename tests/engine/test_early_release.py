"""Tests of early release: a prompt's media blocks are freed as soon as the engine has consumed them."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import aclosing

import numpy as np
import pytest
from PIL import Image

from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Abort, Add, Refill
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import SegmentMissing, StaleReference
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.shm import Ref, arenas_of, attach, release
from mindie_mm.shm.mapped import drop_removed
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.worker import Worker
from tests.engine.conftest import STEP_TIMEOUT_S
from tests.models.contract import picture
from tests.removed_arenas import removed_arenas

pytestmark = pytest.mark.usefixtures("copied_workers")

QUESTION = {"text": "What is in the image? Describe this picture."}
PROMPTS = [[{"image": picture(60, 90, seed)}, {"image": picture(90, 60, seed)}, QUESTION] for seed in (1, 2)]
BLOCKS = 18
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(random_checkpoint, device):
    return load_model(random_checkpoint, device=device)


@pytest.fixture
def tokenizer(random_checkpoint):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        yield tokenizer


class Desk:
    """A tokenizer that frees the blocks of each prompt as soon as the engine has consumed them."""

    def __init__(self, tokenizer, folder):
        self.tokenizer = tokenizer
        self.folder = folder
        self.refilled = []
        self.count = 0

    def ids(self, name):
        return self.tokenizer.tokenize(PROMPTS[int(name)], self.path_file(name)).numpy()

    def path_file(self, name):
        return self.folder / f"{name}.txt"

    def add(self, engine, name, params=PARAMS):
        assert engine.add(Add(name, self.ids(name).tobytes(), params)) is None

    def refill(self, engine, name):
        self.refilled.append(name)
        return engine.refill(Refill(name, self.ids(name).tobytes()))

    def run(self, engine, outputs, parked=None):
        """Run steps until no work is left.

        If a request needs its media again, tokenize its prompt again. If `parked` is given, append the request to it
        instead.
        """
        while engine.has_work():
            for progress in engine.step().progress:
                assert progress.error is None
                outputs.setdefault(progress.request_id, []).extend(progress.token_ids)
                if progress.media_consumed:
                    assert release(self.path_file(progress.request_id)) == 2, (
                        "the engine reports consumed media only once"
                    )
                if progress.needs_media and parked is None:
                    assert self.refill(engine, progress.request_id) is None
                elif progress.needs_media:
                    parked.append(progress.request_id)


@pytest.fixture
def desk(tokenizer, tmp_path):
    desk = Desk(tokenizer, tmp_path)
    yield desk
    for name in "01":
        release(desk.path_file(name))


def small(model, **settings):
    """Return an engine whose KV cache has room for one and a half answers, and whose encoder cache stores nothing."""
    blocks = BLOCKS
    return Engine(
        model,
        EngineConfig(
            kv_block_size=4, kv_cache_bytes=blocks * 4 * model.spec.kv_token_bytes, encoder_cache_bytes=0, **settings
        ),
    )


@pytest.fixture
def alone(model, desk):
    """Return the tokens of each prompt when no other prompt runs."""
    outputs = {}
    for name in "01":
        desk.add(engine := small(model), name)
        desk.run(engine, outputs)
    assert not desk.refilled
    return outputs


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8}, {"prefix_caching": False}], ids=str)
def test_a_preempted_answer_gets_freed_media_again_and_stays_the_same(model, desk, alone, settings):
    engine, outputs = small(model, **settings), {}
    for name in "01":
        desk.add(engine, name)
    desk.run(engine, outputs)
    assert outputs == alone
    assert engine.stats.preemptions
    assert desk.refilled
    assert engine.stats.kv_cache_usage == engine.stats.num_waiting == 0


def park(engine, desk):
    """Run two requests until the first has ended and the second waits for its media. Return their tokens."""
    outputs, parked = {}, []
    for name in "01":
        desk.add(engine, name)
    desk.run(engine, outputs, parked)
    assert parked == ["1"]
    assert not engine.has_work()
    assert (engine.stats.num_running, engine.stats.num_waiting, engine.stats.kv_cache_usage) == (0, 1, 0)
    return outputs


def test_a_parked_request_does_not_block_others_and_continues_after_a_refill(model, desk, alone):
    engine = small(model)
    outputs = park(engine, desk)
    assert outputs["0"] == alone["0"]
    begun = len(outputs["1"])
    assert 0 < begun < len(alone["1"])
    desk.add(engine, "0")
    other = {}
    desk.run(engine, other)
    assert other == {"0": alone["0"]}
    assert len(outputs["1"]) == begun
    assert desk.refill(engine, "1") is None
    desk.run(engine, outputs)
    assert outputs["1"] == alone["1"]


def test_a_parked_request_can_be_aborted(model, desk, alone):
    engine = small(model)
    park(engine, desk)
    engine.abort(Abort("1"))
    assert engine.stats.num_waiting == 0
    assert desk.refill(engine, "1") is None, "a refill of an aborted request is ignored"
    assert not engine.has_work()
    release(desk.path_file("1"))
    desk.add(engine, "1")
    outputs = {}
    desk.run(engine, outputs)
    assert outputs["1"] == alone["1"]


def test_media_lost_before_the_refill_are_requested_again(model, desk, alone):
    engine = small(model)
    outputs = park(engine, desk)
    ids = desk.ids("1")
    release(desk.path_file("1"))
    progress = engine.refill(Refill("1", ids.tobytes()))
    assert progress.needs_media
    assert progress.error is None
    assert not engine.has_work()
    assert desk.refill(engine, "1") is None
    desk.run(engine, outputs)
    assert outputs["1"] == alone["1"]


def test_a_refill_with_changed_media_or_ids_fails_only_its_request(model, desk, tokenizer):
    question = {"text": "What is it?"}
    for changed in ([*PROMPTS[0][:2], QUESTION], [*PROMPTS[1][:2], question]):
        engine = small(model)
        park(engine, desk)
        ids = tokenizer.tokenize(changed, desk.path_file("1")).numpy()
        progress = engine.refill(Refill("1", ids.tobytes()))
        assert progress.error.name == "OperationalError"
        assert "have changed since" in progress.error.message
        release(desk.path_file("1"))
        assert engine.stats.num_waiting == 0
        desk.add(engine, "0")
        desk.run(engine, {})


def test_media_are_consumed_with_their_last_feature_or_with_a_cached_prefix(model, desk):
    engine = Engine(model, EngineConfig(kv_block_size=4, max_num_batched_tokens=8))
    *_, item = model.read(desk.ids("0"))
    release(desk.path_file("0"))
    desk.add(engine, "0")
    steps = 0
    while not any(progress.media_consumed for progress in engine.step().progress):
        steps += 1
    assert steps + 1 == -(-item.stop // 8), "media are consumed in the step that computes their last feature"
    release(desk.path_file("0"))
    desk.run(engine, {})
    desk.add(engine, "0")
    (first,) = engine.step().progress
    assert first.media_consumed
    assert first.cached_tokens > item.stop
    assert not any(progress.media_consumed for progress in engine.step().progress)
    engine.abort(Abort("0"))


def test_a_text_prompt_consumes_no_media(model):
    engine = Engine(model, EngineConfig())
    engine.add(Add("a", np.arange(10, 40).tobytes(), PARAMS))
    while engine.has_work():
        assert not any(progress.media_consumed for progress in engine.step().progress)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_that_only_waits_for_media_does_not_count_as_hung(
    random_checkpoint, model, desk, device, alone, periods, ranks
):
    tokens = BLOCKS * 4
    config = EngineConfig(
        device=device,
        kv_block_size=4,
        kv_cache_bytes=tokens * model.spec.kv_token_bytes // ranks,
        encoder_cache_bytes=0,
        tensor_parallel=ranks,
        step_timeout_s=STEP_TIMEOUT_S,
    )
    engine = await AsyncEngine.start(random_checkpoint, config)
    outputs, needs = {"0": [], "1": []}, asyncio.Event()
    may_refill = asyncio.Event()

    async def answer(name):
        async with aclosing(engine.generate(name, desk.ids(name), PARAMS)) as steps:
            async for progress in steps:
                outputs[name] += progress.token_ids
                if progress.media_consumed:
                    release(desk.path_file(name))
                if progress.needs_media:
                    needs.set()
                    await may_refill.wait()
                    engine.refill(name, desk.ids(name))

    try:
        before = engine.pid
        async with asyncio.TaskGroup() as group:
            group.create_task(answer("0"))
            group.create_task(answer("1"))
            await needs.wait()
            while engine.stats.num_running:  # noqa: ASYNC110 - no event announces this
                await asyncio.sleep(0.001)
            await periods.passed(3)
            assert engine.pid == before
            may_refill.set()
        assert outputs == alone
    finally:
        await engine.close()


async def test_a_running_answer_does_not_keep_a_consumed_arena_mapped(random_checkpoint, device, tmp_path):
    engine = await AsyncEngine.start(random_checkpoint, EngineConfig(device=device, max_model_len=3000))
    try:
        with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
            ids = tokenizer.tokenize(PROMPTS[0], tmp_path / "path").numpy()
            stream = engine.generate("runs", ids, SamplingParams(temperature=0, ignore_eos=True))
            assert (await anext(stream)).media_consumed
            release(tmp_path / "path")
        assert removed_arenas([engine.pid]) == set()
        assert engine.stats.num_running == 1
        await stream.aclose()
    finally:
        await engine.close()


async def test_the_library_also_frees_blocks_early(random_checkpoint, device, tmp_path, monkeypatch):
    monkeypatch.setenv("MINDIE_MM_SPOOL", str(tmp_path / "spool"))
    engine = EngineConfig(device=device, max_model_len=300)
    config = WorkerConfig(model=random_checkpoint, arena_bytes=2**20, engine=engine)
    request = TokenizeRequest(items=[{"image": Image.fromarray(picture(60, 90))}, QUESTION])
    async with await Worker.start(config, in_process=True) as worker:
        async with aclosing(worker.answer(request, SamplingParams(ignore_eos=True, max_tokens=200), "a")) as deltas:
            assert (await anext(deltas)).finish_reason is None
            (arena,) = arenas_of([os.getpid()])
            assert arena.stats.allocations == 1
            assert arena.used_bytes == 0
            assert [delta.finish_reason async for delta in deltas][-1] == "length"
        assert worker.media_remade == 0


def test_a_loose_view_does_not_keep_its_arena_mapped(tokenizer, tmp_path):
    ids = tokenizer.tokenize(PROMPTS[0], tmp_path / "path").numpy()
    words = ids[ids < 0][:2].tolist()
    view = attach(Ref.from_words(*words))
    loose, expected = view.loose(), view["pixel_values"].copy()
    assert (loose.ref, loose.digest, loose.nbytes, [*loose]) == (view.ref, view.digest, view.nbytes, [*view])
    assert np.array_equal(loose["pixel_values"], expected)
    loose.verify()
    del view
    release(tmp_path / "path")
    for use in (loose.verify, lambda: loose["pixel_values"], lambda: len(loose)):
        with pytest.raises(StaleReference):
            use()
    tokenizer.close()
    drop_removed(cleanups=True)
    gc.collect()
    with pytest.raises(SegmentMissing, match="the arena of the block was closed"):
        loose.verify()
