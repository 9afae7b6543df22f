"""Tests for early release: a prompt's media blocks are freed as soon as the engine has consumed them."""

from __future__ import annotations

import os
from contextlib import aclosing

import numpy as np
import pytest
from PIL import Image

from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Abort, Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import StaleReference
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.shm import Ref, arenas_of, attach, release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.requests import request_of_items
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.worker import Worker
from tests.models.contract import noise
from tests.removed_arenas import removed_arenas

pytestmark = pytest.mark.usefixtures("copied_workers")

QUESTION = {"text": "What is in the image? Describe this picture."}
PROMPTS = [[{"image": noise(60, 90, seed)}, {"image": noise(90, 60, seed)}, QUESTION] for seed in (1, 2)]
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
        self.added_again = []

    def ids(self, name):
        return self.tokenizer.tokenize(PROMPTS[int(name)], self.path_file(name)).numpy()

    def path_file(self, name):
        return self.folder / f"{name}.txt"

    def add(self, engine, name, drawn_ids=()):
        """Add a request. Requests with higher names were asked for later."""
        message = Add(name, self.ids(name).tobytes(), PARAMS, float(name), [*drawn_ids])
        assert engine.add(message) is None
        if drawn_ids:
            self.added_again.append(name)

    def run(self, engine, outputs, lost=None):
        """Run steps until no work is left.

        If a request ends because its media were freed, tokenize its prompt again and add the request again. If `lost`
        is given, append the request to it instead.
        """
        while engine.has_work():
            for progress in engine.step().progress:
                name = progress.request_id
                outputs.setdefault(name, []).extend(progress.token_ids)
                if progress.media_consumed:
                    assert release(self.path_file(name)) == 2, "the engine reports consumed media only once"
                if progress.error is None:
                    continue
                assert progress.error.name == "StaleReference"
                if lost is None:
                    self.add(engine, name, outputs[name])
                else:
                    lost.append(name)


@pytest.fixture
def desk(tokenizer, tmp_path):
    desk = Desk(tokenizer, tmp_path)
    yield desk
    for name in "01":
        release(desk.path_file(name))


def small(model, **settings):
    """Return an engine whose KV cache has room for one and a half answers, and whose encoder cache stores nothing."""
    default = {"kv_block_size": 4, "encoder_cache_bytes": 0}
    config = EngineConfig(kv_cache_bytes=BLOCKS * 4 * model.spec.kv_token_bytes, **default | settings)
    return Engine(model, config)


@pytest.fixture
def alone(model, desk):
    """Return the tokens of each prompt when no other prompt runs."""
    outputs = {}
    for name in "01":
        desk.add(engine := small(model), name)
        desk.run(engine, outputs)
    assert not desk.added_again
    return outputs


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8}, {"prefix_caching": False}], ids=str)
def test_a_preempted_answer_gets_freed_media_again_and_stays_the_same(model, desk, alone, settings):
    engine, outputs = small(model, **settings), {}
    for name in "01":
        desk.add(engine, name)
    desk.run(engine, outputs)
    assert outputs == alone
    assert engine.stats.preemptions
    assert {*desk.added_again} == {"1"}, "the first request keeps its place"
    assert engine.stats.kv_cache_usage == engine.stats.num_waiting == 0


def test_a_request_that_lost_its_media_leaves_the_engine_and_does_not_block_others(model, desk, alone):
    engine, outputs, lost = small(model), {}, []
    for name in "01":
        desk.add(engine, name)
    desk.run(engine, outputs, lost)
    assert lost == ["1"]
    assert (engine.stats.num_running, engine.stats.num_waiting, engine.stats.kv_cache_usage) == (0, 0, 0)
    assert outputs["0"] == alone["0"]
    begun = outputs["1"]
    assert begun == alone["1"][: len(begun)]
    assert 0 < len(begun) < len(alone["1"])
    other = {}
    desk.add(engine, "0")
    desk.run(engine, other)
    assert other == {"0": alone["0"]}
    desk.add(engine, "1", begun)
    desk.run(engine, outputs)
    assert outputs["1"] == alone["1"]


def test_a_preempted_answer_whose_features_are_cached_stays_in_the_engine(model, desk, alone):
    engine, outputs = small(model, encoder_cache_bytes=2**20), {}
    for name in "01":
        desk.add(engine, name)
    desk.run(engine, outputs)
    assert outputs == alone
    assert engine.stats.preemptions
    assert not desk.added_again


def test_media_are_consumed_with_their_last_feature_or_with_a_cached_prefix(model, desk):
    engine = Engine(model, EngineConfig(kv_block_size=4, max_num_batched_tokens=8, async_scheduling=False))
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
    request = request_of_items([{"image": Image.fromarray(noise(60, 90))}, QUESTION])
    async with await Worker.start(config, in_process=True) as worker:
        async with aclosing(worker.answer(request, SamplingParams(ignore_eos=True, max_tokens=200), "a")) as deltas:
            assert (await anext(deltas)).finish_reason is None
            (arena,) = arenas_of([os.getpid()])
            assert arena.stats.allocations == 1
            assert arena.used_bytes == 0
            assert [delta.finish_reason async for delta in deltas][-1] == "length"
        assert worker.media_remade == 0


def test_a_closed_view_does_not_keep_its_arena_mapped(tokenizer, tmp_path):
    ids = tokenizer.tokenize(PROMPTS[0], tmp_path / "path").numpy()
    view = attach(Ref.from_words(*ids[ids < 0][:2].tolist()))
    known = view.ref, view.digest, view.nbytes, [*view]
    view.verify()
    view.close()
    view.close()
    assert (view.ref, view.digest, view.nbytes, [*view]) == known
    uses = (view.verify, lambda: view["pixel_values"], lambda: "pixel_values" in view, lambda: view.arena)
    for use in (*uses, lambda: view.file_offset("pixel_values")):
        with pytest.raises(StaleReference, match="may have been freed"):
            use()
    release(tmp_path / "path")
    tokenizer.close()
    assert removed_arenas([os.getpid()]) == set()
