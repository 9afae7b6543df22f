"""Tests for several engines of one service: the choice of an engine, deaths and reloads."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from mindie_mm.device import open_device
from mindie_mm.engine.process.placing import placed, shares
from mindie_mm.engine.ranks import ALONE
from mindie_mm.engine.requests.engine_messages import Replica
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import DeviceError, InputError, ProcessDied
from mindie_mm.settings.cgroup import available_cpus
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.shm import Arena, ArraySpec
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.content import BLOCK_TOKENS, contents_of
from mindie_mm.worker.engine_replicas import ANSWER_TOKENS, EngineReplicas
from mindie_mm.worker.retry import PromptSource, generated

pytestmark = pytest.mark.usefixtures("copied_workers")

SURPLUS = 4 * ANSWER_TOKENS
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


def unchanged():
    return lambda step: step


def ids(seed: int, length: int = 2 * BLOCK_TOKENS) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(10, 60, length)


@pytest.fixture(scope="module")
async def pair(random_checkpoint: Path, device: str) -> AsyncIterator[EngineReplicas]:
    if (num := available_cpus() if device == "cpu" else open_device(device).count()) < 2:
        pytest.skip(f"two engines need two devices; there are {num}")
    config = EngineConfig(device=device, max_model_len=256)
    engines = await EngineReplicas.start(partial(AsyncEngine.start, random_checkpoint, config), 2, config, SURPLUS)
    yield engines
    await engines.close()


async def tokens(pair: Any, request_id: str, prompt: NDArray[np.int64], params: SamplingParams = SHORT) -> list[int]:
    return [token async for step in pair.generate(request_id, prompt, params) for token in step.token_ids]


def queries(engine: AsyncEngine) -> int:
    return engine.stats.prefix_cache_queries


async def test_a_repeated_prompt_goes_to_the_engine_that_has_computed_it(pair: EngineReplicas) -> None:
    before = [queries(engine) for engine in pair.engines]
    for turn in range(3):
        steps = [step async for step in pair.generate(f"repeated-{turn}", ids(1), SHORT)]
        assert bool(steps[0].cached_tokens) == (turn > 0)
    grown = sorted(queries(engine) - count for engine, count in zip(pair.engines, before, strict=True))
    assert grown == [0, 3 * len(ids(1))]


async def test_new_prompts_are_spread_by_load(pair: EngineReplicas) -> None:
    async with aclosing(pair.generate("one", ids(2), LONG)) as one, aclosing(pair.generate("two", ids(3), LONG)) as two:
        await asyncio.gather(anext(one), anext(two))
        assert [len(engine._requests) for engine in pair.engines] == [1, 1]


async def test_an_engine_above_the_surplus_does_not_get_the_requests_whose_prefix_it_holds(
    pair: EngineReplicas,
) -> None:
    await tokens(pair, "first", ids(4))
    most = SURPLUS // ANSWER_TOKENS + 2
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(tokens(pair, f"more-{i}", ids(4), LONG)) for i in range(2 * most)]
        while sum(len(engine._requests) for engine in pair.engines) < 2 * most:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        counts = [len(engine._requests) for engine in pair.engines]
        assert min(counts) > 0, counts
    assert len({tuple(task.result()) for task in running}) == 1


async def test_an_engine_that_dies_loses_only_its_own_requests(pair: EngineReplicas) -> None:
    async with aclosing(pair.generate("one", ids(5), LONG)) as one, aclosing(pair.generate("two", ids(6), LONG)) as two:
        await asyncio.gather(anext(one), anext(two))
        dying = next(engine for engine in pair.engines if "one" in engine._requests)
        os.kill(pid := dying.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match=f"engine process {pid} died"):
            async for _ in one:
                pass
        pair.check()
        assert sum([len(step.token_ids) async for step in two]) == LONG.max_tokens - 1
        assert len(await tokens(pair, "next", ids(5))) == 4
    await dying.wait_until_up()
    assert pair.num_alive == 2
    steps = [step async for step in dying.generate("forgotten", ids(5), SHORT)]
    assert not steps[0].cached_tokens
    assert pair._members[pair.engines.index(dying)].num_held(contents_of(ids(5), "")) == 0


async def test_a_request_without_output_is_sent_to_another_engine_at_once(pair: EngineReplicas) -> None:
    right = await tokens(pair, "alone", ids(7))
    for engine in pair.engines:
        os.kill(engine.pid, signal.SIGSTOP)

    async def answer() -> list[int]:
        outputs = generated(pair, PromptSource(Prompt(ids(7))), SHORT, "moved", unchanged)
        return [token async for step in outputs for token in step.token_ids]

    answering = asyncio.create_task(answer())
    while not (owners := [engine for engine in pair.engines if "moved" in engine._requests]):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    (dying,) = owners
    (other,) = [engine for engine in pair.engines if engine is not dying]
    os.kill(dying.pid, signal.SIGKILL)
    while "moved" not in other._requests:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    os.kill(other.pid, signal.SIGCONT)
    assert await answering == right
    await dying.wait_until_up()


async def test_an_answer_that_has_begun_continues_in_another_engine(pair: EngineReplicas) -> None:
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    right = await tokens(pair, "alone", ids(10), drawn)
    pids = {engine.pid for engine in pair.engines}
    found: list[int] = []
    async with aclosing(generated(pair, PromptSource(Prompt(ids(10))), drawn, "continued", unchanged)) as steps:
        async for step in steps:
            if not found:
                (dying,) = [engine for engine in pair.engines if "continued" in engine._requests]
                os.kill(dying.pid, signal.SIGKILL)
            found += step.token_ids
    assert found == right
    await dying.wait_until_up()
    assert len({engine.pid for engine in pair.engines} & pids) == 1


async def test_a_reload_replaces_the_engines_one_by_one_and_lets_requests_finish(pair: EngineReplicas) -> None:
    right, pids, restarts = await tokens(pair, "before", ids(8)), {engine.pid for engine in pair.engines}, pair.restarts
    async with aclosing(pair.generate("one", ids(9), LONG)) as one, aclosing(pair.generate("two", ids(9), LONG)) as two:
        await asyncio.gather(anext(one), anext(two))
        reloading = asyncio.create_task(pair.reload(grace_s=600))
        first = pair.engines[0]
        while first.accepts:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        with pytest.raises(ProcessDied, match="the engine process is being reloaded"):
            first.check()
        direct = asyncio.create_task(tokens(first, "waiting", ids(8)))
        for stream in (one, two):
            assert sum([len(step.token_ids) async for step in stream]) == LONG.max_tokens - 1
    later = 0
    while not reloading.done():
        assert pair.num_alive >= 1
        assert await tokens(pair, f"later-{later}", ids(8)) == right
        later += 1
    await reloading
    assert await direct == right
    assert pair.num_alive == 2
    assert not {engine.pid for engine in pair.engines} & pids
    assert pair.restarts == restarts, "a reload is not a death"


@pytest.mark.slow
async def test_requests_that_exceed_the_grace_time_of_a_reload_are_sent_to_another_engine(
    pair: EngineReplicas,
) -> None:
    right = await tokens(pair, "before", ids(8), LONG)

    async def answer(number: int) -> list[int]:
        outputs = generated(pair, PromptSource(Prompt(ids(8))), LONG, f"r-{number}", unchanged)
        return [token async for step in outputs for token in step.token_ids]

    running = [asyncio.create_task(answer(number)) for number in range(20)]
    while min(len(engine._requests) for engine in pair.engines) == 0:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    reloading = asyncio.create_task(pair.reload(grace_s=0))
    while not reloading.done():
        running.append(asyncio.create_task(answer(len(running))))
        await running[-1]
    await reloading
    assert [await task for task in running] == [right] * len(running)


@pytest.mark.slow
async def test_a_reload_waits_for_an_engine_that_is_being_restarted(pair: EngineReplicas) -> None:
    first, second = pair.engines
    os.kill(second.pid, signal.SIGKILL)
    while second.accepts:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    reloading, pid = asyncio.create_task(pair.reload(grace_s=600)), first.pid
    await asyncio.sleep(0)
    assert first.accepts
    await reloading
    assert first.pid != pid
    assert pair.num_alive == 2


@pytest.mark.slow
async def test_reloads_at_the_same_time_share_the_processes_that_have_not_started(
    random_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(device="cpu")
    engines = EngineReplicas([engine := await AsyncEngine.start(random_checkpoint, config)], config, SURPLUS)

    def num_replaced() -> int:
        return sum("is being replaced" in message for message in caplog.messages)

    with caplog.at_level(logging.INFO):
        first, second = (asyncio.create_task(engine.reload(grace_s=0)) for _ in range(2))
        while engine.accepts:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        first.cancel()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
        assert num_replaced() == 1
        await asyncio.gather(*(engines.reload(grace_s=0) for _ in range(4)))
        assert num_replaced() == 3, "the calls during the first reload share a second one"
    await engines.close()


IMPOSSIBLE = Replica(0, 10**6)
"""A place for which no engine starts, as if its device were broken."""
NO_PLACE = "replicas is 1000000, but the number of"


@pytest.mark.slow
async def test_a_reload_leaves_out_an_engine_that_cannot_be_restarted(pair: EngineReplicas) -> None:
    first, second = pair.engines
    start, pid = first._start, second.pid
    first.place(IMPOSSIBLE)
    os.kill(first.pid, signal.SIGKILL)
    while first.accepts:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    results = await asyncio.gather(*(pair.reload(grace_s=0) for _ in range(3)), return_exceptions=True)
    for result in results:
        assert isinstance(result, ProcessDied)
        assert str(result).startswith(f"engine 0 was not replaced: the engine process did not start: {NO_PLACE}")
    assert second.pid != pid
    assert len(await tokens(pair, "by the other", ids(7))) == 4
    first._start = start
    await first.wait_until_up()
    await pair.reload(grace_s=0)
    assert pair.num_alive == 2


@pytest.mark.slow
async def test_a_reload_stops_at_an_engine_that_does_not_start(pair: EngineReplicas) -> None:
    """The next reload waits for it, because the cause may be a faulty checkpoint, which would stop all engines."""
    first, second = pair.engines
    start, pid = first._start, second.pid
    first.place(IMPOSSIBLE)
    with pytest.raises(ProcessDied, match=f"engine 0 did not start again, and .* not replaced: {NO_PLACE}"):
        await pair.reload(grace_s=0)
    again = asyncio.create_task(pair.reload(grace_s=0))
    failures = pair.restarts.failed
    while not (pair.restarts.failed > failures or again.done()):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    assert second.pid == pid
    pair.check()
    first._start = start
    await again
    assert second.pid != pid
    assert pair.num_alive == 2


@pytest.mark.slow
async def test_engines_that_are_all_closed_refuse_requests(random_checkpoint: Path) -> None:
    config = EngineConfig(device="cpu")
    engines = EngineReplicas([engine := await AsyncEngine.start(random_checkpoint, config)], config, SURPLUS)
    ending = asyncio.create_task(engine.reload(grace_s=600))
    endless = msgspec.structs.replace(LONG, max_tokens=8000)
    async with aclosing(engines.generate("a", ids(1), endless)) as stream:
        await anext(stream)
        while engine.accepts:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        await engines.close()
        with pytest.raises(ProcessDied, match="the engine process is closed"):
            await ending
        with pytest.raises(ProcessDied):
            async for _ in stream:
                pass
    with pytest.raises(ProcessDied, match="the engine process is closed"):
        await tokens(engines, "b", ids(1))


def test_more_engines_than_processors_are_refused_with_both_numbers() -> None:
    with pytest.raises(DeviceError, match=rf"replicas is 10000, but the number of CPUs is {available_cpus()}"):
        placed(EngineConfig(device="cpu"), Replica(0, 10000), ALONE)


def test_engines_divide_the_processors() -> None:
    cpus = {*range(7)}
    parts = shares(cpus, 3)
    assert set().union(*parts) == cpus
    assert sum(map(len, parts)) == len(cpus)
    assert {len(part) for part in parts} == {2, 3}


@pytest.mark.parametrize("value", [0, -1, "0", "two", "", 1.5, True, None])
def test_a_wrong_number_of_replicas_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"^replicas(=| is ).*must be|^replicas is '', which is empty"):
        WorkerConfig(replicas=value)  # type: ignore[arg-type]


def test_replicas_need_a_device_without_an_index() -> None:
    assert WorkerConfig(replicas="2").replicas == 2  # type: ignore[arg-type]
    assert WorkerConfig(replicas="auto").replicas == "auto"
    for replicas in (2, "auto"):
        with pytest.raises(InputError, match="device is 'npu:1', which is one device, but replicas is"):
            WorkerConfig(replicas=replicas, engine=EngineConfig(device="npu:1"))  # type: ignore[arg-type]


def test_contents_name_the_media_and_the_prefix_of_a_prompt(tmp_path: Path) -> None:
    specs = {"pixels": ArraySpec((4, 4), "float32"), "item": ArraySpec((3,), "int64")}
    with Arena.create(2**20) as arena:

        def written(digest: bytes) -> tuple[NDArray[np.int64], Any]:
            with arena.allocate(specs, path_file=tmp_path / "paths") as block:
                block["item"][...] = (0, 7, 70)
                ref = block.publish(digest)
            prompt = np.full(3 * BLOCK_TOKENS, 5, np.int64)
            prompt[BLOCK_TOKENS + 3 : BLOCK_TOKENS + 73] = 7
            prompt[BLOCK_TOKENS + 3 : BLOCK_TOKENS + 5] = ref.to_words()
            return prompt, block

        one, block = written(b"a" * 32)
        again, other = written(b"a" * 32)[0], written(b"b" * 32)[0]
        found = contents_of(one, "")
        assert [(item.key, item.num_tokens) for item in found.media] == [(b"a" * 32, 70)]
        assert [content.num_tokens for content in found.prefix] == [BLOCK_TOKENS] * 3
        assert contents_of(again, "") == found, "the handle words differ, but the content is the same"
        of_other = contents_of(other, "")
        assert [a == b for a, b in zip(found.prefix, of_other.prefix, strict=True)] == [True, False, False]
        assert found.first_key == b"a" * 32
        assert not {c.key for c in contents_of(one, "salt").prefix} & {c.key for c in found.prefix}
        arena.free(block)
        gone = contents_of(one, "")
        assert gone.media == []
        assert gone.prefix == found.prefix[:1], "tokens after an unknown item are not known either"
    assert contents_of(one, "") == gone
    assert contents_of(np.zeros(0, np.int64), "").first_key == b""


def test_a_long_prompt_has_few_blocks_which_do_not_depend_on_its_end() -> None:
    prompt = ids(10, 200_000)
    prefix = contents_of(prompt, "").prefix
    assert len(prefix) < 200
    assert 0 <= len(prompt) - sum(content.num_tokens for content in prefix) <= len(prompt) / 32
    for length in (BLOCK_TOKENS, 5000, 100_000):
        whole = contents_of(prompt[:length], "").prefix
        assert whole == prefix[: len(whole)]
        assert sum(content.num_tokens for content in whole) >= length * 31 / 32
