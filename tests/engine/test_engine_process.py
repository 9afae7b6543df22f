"""Tests for the engine in a separate process: streams, aborts and crashes."""

import asyncio
import os
import signal
import time
from contextlib import aclosing, nullcontext

import msgspec
import numpy as np
import pytest

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import (
    ContextLengthExceeded,
    CorruptReference,
    InputError,
    NoProcess,
    ProcessDied,
    StaleReference,
    TokenOutOfRange,
    UnsupportedCheckpoint,
)
from mindie_mm.processes.restarts import RESTART_WAIT_S
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import arenas_of, free, release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.worker.async_engine import AsyncEngine
from tests.engine.conftest import STEP_TIMEOUT_S
from tests.models.contract import noise
from tests.removed_arenas import removed_arenas

PROMPT = np.arange(10, 40, dtype=np.int64)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("copied_workers")


@pytest.fixture(scope="module")
async def engine(random_checkpoint, device):
    engine = await AsyncEngine.start(random_checkpoint, EngineConfig(device=device, max_model_len=256))
    yield engine
    await engine.close()


async def tokens(engine, request_id, ids=PROMPT, params=GREEDY):
    return [token async for progress in engine.generate(request_id, ids, params) for token in progress.token_ids]


async def test_concurrent_requests_get_the_same_tokens_as_alone(engine):
    prompts = [PROMPT[: 5 + i] for i in range(12)]
    alone = [await tokens(engine, f"alone-{i}", ids) for i, ids in enumerate(prompts)]
    together = await asyncio.gather(*(tokens(engine, f"together-{i}", ids) for i, ids in enumerate(prompts)))
    assert together == alone
    assert all(len(found) == 16 for found in alone)


async def test_leaving_the_stream_early_aborts_the_request(engine):
    endless = SamplingParams(temperature=0, ignore_eos=True)
    stream = engine.generate("left", PROMPT, endless)
    async for _ in stream:
        break
    await stream.aclose()
    async with asyncio.timeout(300):
        while engine.stats.num_running or engine.stats.kv_cache_usage:  # noqa: ASYNC110 - no event announces this
            await asyncio.sleep(0)
    assert engine.stats.num_waiting == 0


async def test_the_last_progress_has_reason_and_timings(engine):
    *_, last = [progress async for progress in engine.generate("last", PROMPT, GREEDY)]
    assert last.finish_reason == "length"
    assert last.timings.decode_s > 0


async def test_without_max_tokens_the_answer_fills_the_context(engine):
    found = await tokens(engine, "full", PROMPT, SamplingParams(temperature=0, ignore_eos=True))
    assert len(found) == 256 - len(PROMPT)


async def test_a_seed_gives_the_same_tokens_in_any_batch(engine):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    alone = await tokens(engine, "seed", PROMPT, params)
    others = [tokens(engine, f"noise-{i}", PROMPT[i:], SamplingParams(max_tokens=9)) for i in range(5)]
    among, *_ = await asyncio.gather(tokens(engine, "again", PROMPT, params), *others)
    assert among == alone


async def test_a_stop_token_id_ends_the_answer(engine):
    (first, second, *_) = await tokens(engine, "free")
    params = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=(second,), ignore_eos=True)
    *_, last = [progress async for progress in engine.generate("stopped", PROMPT, params)]
    assert (last.finish_reason, last.stop_token_id) == ("stop", second)
    assert last.token_ids == [second]
    assert first != second


@pytest.mark.parametrize(
    ("ids", "params", "error", "words"),
    [
        (
            np.arange(250),
            GREEDY,
            ContextLengthExceeded,
            "length is 256 tokens; the prompt has 250 tokens and the request needs 16 output tokens",
        ),
        (np.array([], np.int64), GREEDY, ContextLengthExceeded, "the prompt has 0 tokens"),
        (np.array([10**6]), GREEDY, TokenOutOfRange, r"1000000 is not in \[0, 328\)"),
        (np.array([5, -7]), GREEDY, CorruptReference, "the token at position 1 is -7"),
        (PROMPT, SamplingParams(temperature=-1), InputError, "temperature=-1"),
        (PROMPT, SamplingParams(stop=5), InputError, r"stop=5 must be a list, not an integer"),
        (PROMPT, SamplingParams(temperature=None), InputError, r"temperature must be a number, not null"),
        (PROMPT, SamplingParams(bad_words=("a",)), InputError, "bad_words is set, .* give bad_token_ids"),
        (PROMPT, SamplingParams(allowed_token_ids=(5,), bad_token_ids=((5,),)), InputError, "exclude every token"),
    ],
    ids=[
        "too long",
        "empty",
        "no such id",
        "no word",
        "bad setting",
        "a number as stop",
        "no temperature",
        "words",
        "no token",
    ],
)
async def test_an_invalid_request_does_not_affect_other_requests(engine, ids, params, error, words):
    neighbour = asyncio.create_task(tokens(engine, "neighbour"))
    with pytest.raises(error, match=words):
        await tokens(engine, "wrong", ids.astype(np.int64), params)
    assert len(await neighbour) == 16


@pytest.mark.parametrize("lost", [0, 1], ids=["answered", "failed over its second image"])
async def test_an_idle_engine_unmaps_a_removed_arena(engine, random_checkpoint, tmp_path, lost):
    """While the arena is mapped, /dev/shm may have no room for the next tokenizer's arena."""
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        ids = tokenizer.tokenize([{"image": noise(60, 90)}, {"image": noise(90, 60)}], tmp_path / "path").numpy()
        (arena,) = arenas_of([os.getpid()])
        for block in arena.blocks[:lost]:
            free(arena.ref(block))
        with pytest.raises(StaleReference) if lost else nullcontext():
            await tokens(engine, "images", ids)
        release(tmp_path / "path")
    assert removed_arenas([engine.pid]) == set()
    assert len(await tokens(engine, "next")) == 16


async def test_a_running_request_ends_normally_when_its_arena_is_removed(engine, random_checkpoint, tmp_path):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        ids = tokenizer.tokenize([{"image": noise(60, 90)}], tmp_path / "path").numpy()
        stream = engine.generate("runs", ids, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
        await anext(stream)
        release(tmp_path / "path")
    *_, last = [progress async for progress in stream]
    assert (last.finish_reason, last.error) == ("length", None)
    assert removed_arenas([engine.pid]) == set()


async def test_requests_fail_at_once_while_the_engine_cannot_restart(engine, tmp_path, monkeypatch):
    """While the checkpoint is missing, waiting and new requests fail immediately.

    When the checkpoint is back, requests are answered.
    """
    start = engine._start
    monkeypatch.setattr(engine, "_start", msgspec.structs.replace(start, model=str(tmp_path / "gone")))
    os.kill(engine.pid, signal.SIGKILL)
    while not why_down(engine):  # noqa: ASYNC110 - no event announces this
        await asyncio.sleep(0)
    async with asyncio.timeout(0.9 * RESTART_WAIT_S):
        for request_id in ("waits", "comes later"):
            with pytest.raises(
                NoProcess, match=f"the engine process did not start: {tmp_path}/gone is not a checkpoint directory"
            ):
                await tokens(engine, request_id)
        monkeypatch.setattr(engine, "_start", start)
        while engine._starter.patience_s() == 0:  # noqa: ASYNC110 - no event announces this
            await asyncio.sleep(0.01)
    assert len(await tokens(engine, "once it is back")) == 16


async def test_a_killed_engine_fails_running_requests_and_restarts(random_checkpoint, device):
    engine = await AsyncEngine.start(random_checkpoint, EngineConfig(device=device))
    right, before = await tokens(engine, "before"), engine.pid
    stream = engine.generate("r", PROMPT, SamplingParams(temperature=0, ignore_eos=True))
    await anext(stream)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match=f"engine process {before} died with status -9"):
        async for _ in stream:
            pass
    with pytest.raises(ProcessDied, match="the engine process died, and another one is being started"):
        engine.check()
    asked = time.monotonic()
    up = asyncio.create_task(waited(engine, asked))
    later = [progress async for progress in engine.generate("later", PROMPT, GREEDY)]
    assert [token for progress in later for token in progress.token_ids] == right, (
        "a later request waits for the next process"
    )
    assert 0.5 * await up < later[-1].timings.queue_s < time.monotonic() - asked, (
        "queue_s includes the wait for the next process"
    )
    assert engine.pid != before
    engine.check()
    await engine.close()
    with pytest.raises(ProcessDied, match="closed"):
        engine.check()
    with pytest.raises(ProcessDied, match="closed"):
        await tokens(engine, "too late")


async def test_a_restarted_engine_keeps_its_cache_size_whatever_other_processes_take(random_checkpoint, device):
    share = EngineConfig(device=device, memory_share=0.1, encoder_cache_bytes=0, max_num_seqs=10**6)
    engine = await AsyncEngine.start(random_checkpoint, share)
    try:
        first, before = engine.info, engine.pid
        taken = b"x" * 2**29
        os.kill(before, signal.SIGKILL)
        while not why_down(engine):  # noqa: ASYNC110 - no event announces this
            await asyncio.sleep(0)
        await tokens(engine, "later")
        assert engine.pid != before
        assert engine.info.step_bytes == first.step_bytes > 0
        assert msgspec.structs.replace(engine.info, free_bytes=first.free_bytes) == first
        del taken
    finally:
        await engine.close()


async def test_an_engine_that_hangs_is_restarted(random_checkpoint, device, caplog, periods):
    engine = await AsyncEngine.start(random_checkpoint, EngineConfig(device=device, step_timeout_s=STEP_TIMEOUT_S))
    try:
        right, before = await tokens(engine, "before"), engine.pid
        await periods.passed(3)
        assert engine.pid == before, "an idle engine is not restarted"
        os.kill(before, signal.SIGSTOP)
        message = f"engine process {before} made no progress for {STEP_TIMEOUT_S:g} s and was stopped"
        hung = asyncio.create_task(tokens(engine, "hung"))
        await periods.passed(2)
        with pytest.raises(ProcessDied, match=message):
            await hung
        assert message in caplog.text
        assert await tokens(engine, "later") == right
    finally:
        await engine.close()


async def test_an_idle_engine_is_not_stopped_while_a_caller_is_slow_to_read(random_checkpoint, device, periods):
    engine = await AsyncEngine.start(random_checkpoint, EngineConfig(device=device, step_timeout_s=STEP_TIMEOUT_S))
    try:
        before, params = engine.pid, SamplingParams(temperature=0, max_tokens=3)
        async with aclosing(engine.generate("slow", np.arange(10, 14), params)) as progress:
            assert (await anext(progress)).finish_reason is None
            while engine.stats.num_running:  # noqa: ASYNC110 - no event announces this
                await asyncio.sleep(0.001)
            await periods.passed(3)
            assert engine.pid == before
            assert [one.finish_reason async for one in progress][-1] == "length"
    finally:
        await engine.close()


async def waited(engine, since):
    await engine.wait_until_up()
    return time.monotonic() - since


def why_down(engine):
    try:
        engine.check()
    except ProcessDied as error:
        return str(error)
    return ""


async def test_a_folder_without_a_checkpoint_is_refused_at_the_start(tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match=r"no config\.json"):
        await AsyncEngine.start(tmp_path, EngineConfig())
