"""Tests for progress that is sent together. Clients get the same answers as with one message per token."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindie_mm.engine.process.engine_process import load_engine
from mindie_mm.engine.process.progress_collector import HOLD_S, ProgressCollector
from mindie_mm.engine.ranks import ALONE
from mindie_mm.engine.requests.engine_messages import Abort, Add, Progress, Ready, Start, Stats, Stepped
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import OperationalError
from mindie_mm.processes.ipc import Child, Failure
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.worker import Worker

PROMPT = np.arange(10, 40, dtype=np.int64)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
ABORT_S = 0.05
"""Maximum time in seconds after which the engine has ended an aborted request."""

pytestmark = pytest.mark.usefixtures("copied_workers")


class Clock:
    """A clock that a test sets, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def token(request_id, number, **more):
    return Progress(request_id=request_id, token_ids=[number], **more)


URGENT = {
    "first token": {"cached_tokens": 0},
    "last token": {"finish_reason": "length"},
    "stop": {"finish_reason": "stop", "stop_token_id": 7},
    "media consumed": {"media_consumed": True},
    "error": {"token_ids": [], "error": Failure.of(OperationalError("it failed"))},
}


@pytest.mark.parametrize("kind", URGENT)
def test_only_further_tokens_are_held(kind):
    collector = ProgressCollector(Clock())
    assert collector.add(Stepped([token("a", 1), token("b", 2)], Stats(num_running=2))) is None
    urgent = msgspec.structs.replace(token("a", 3), **URGENT[kind])
    sent = collector.add(Stepped([urgent, token("b", 4)], Stats(num_running=2)))
    assert [drawn for one in sent.progress if one.request_id == "a" for drawn in one.token_ids] == [
        1,
        *urgent.token_ids,
    ]
    assert [one.token_ids for one in sent.progress if one.request_id == "b"] == [[2, 4]]
    *before, last = [one for one in sent.progress if one.request_id == "a"]
    assert msgspec.structs.replace(last, token_ids=urgent.token_ids) == urgent
    assert len(before) == (not urgent.token_ids), "progress without tokens follows the tokens"
    assert collector.take() == []


def test_several_tokens_of_a_request_in_one_step_are_held():
    collector = ProgressCollector(Clock())
    step = [token("a", 1), token("b", 2), token("a", 3)]
    assert collector.add(Stepped(step, Stats(num_running=2))) is None
    assert [one.token_ids for one in collector.take()] == [[1, 3], [2]]


def test_no_token_is_held_while_another_request_reads_its_prompt():
    """The next step may then take long."""
    collector = ProgressCollector(Clock())
    assert collector.add(Stepped([token("a", 1)], Stats(num_running=2))).progress == [token("a", 1)]


@given(st.lists(st.floats(0.0001, 0.02), min_size=1, max_size=60), st.integers(1, 3))
def test_tokens_arrive_in_order_and_in_time(durations_s, num_requests):
    """A token is late by at most `HOLD_S` and the time by which a step is longer than the step before."""
    clock = Clock()
    collector = ProgressCollector(clock)
    drawn, received = [], []
    longer_s = max((max(0, b - a) for a, b in pairwise(durations_s)), default=0)
    for number, duration_s in enumerate(durations_s):
        clock.now_s += duration_s
        step = [token(str(request), number) for request in range(num_requests)]
        sent = collector.add(Stepped(step, Stats(num_running=num_requests)))
        drawn.append(clock.now_s)
        if sent is not None:
            assert len(sent.progress) == num_requests
            assert all(one.token_ids == sent.progress[0].token_ids for one in sent.progress)
            received += sent.progress[0].token_ids
            assert clock.now_s - drawn[sent.progress[0].token_ids[0]] <= HOLD_S + longer_s + 1e-9
    received += [number for one in collector.take()[:1] for number in one.token_ids]
    assert received == [*range(len(durations_s))]


def test_quick_steps_share_messages():
    clock = Clock()
    collector = ProgressCollector(clock)
    sizes = []
    for number in range(60):
        clock.now_s += HOLD_S / 4.5
        if (sent := collector.add(Stepped([token("a", number)], Stats(num_running=1)))) is not None:
            sizes.append(len(sent.progress[0].token_ids))
    assert sizes == [5] * 12


@pytest.fixture(scope="module")
def start(random_checkpoint, device):
    return Start(str(random_checkpoint), EngineConfig(device=device, max_model_len=256, prefix_caching=False))


@pytest.fixture(scope="module")
async def engine(random_checkpoint, start):
    engine = await AsyncEngine.start(random_checkpoint, start.config)
    yield engine
    await engine.close()


REQUESTS = [
    GREEDY,
    msgspec.structs.replace(GREEDY, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=1.5, seed=7, max_tokens=31, logprobs=0, ignore_eos=True),
    msgspec.structs.replace(GREEDY, max_tokens=1, logprobs=1),
    msgspec.structs.replace(GREEDY, max_tokens=0, prompt_logprobs=1),
    msgspec.structs.replace(GREEDY, temperature=1, seed=1, stop_token_ids=tuple(range(0, 328, 16)), logprobs=1),
    SamplingParams(temperature=1, seed=3, min_tokens=5, max_tokens=150, logprob_token_ids=(3, 4), logprobs=0),
    msgspec.structs.replace(GREEDY, max_tokens=2),
]


def joined(steps):
    """Return the progress of one request as a single object, without times."""
    whole = msgspec.structs.replace(
        steps[-1],
        token_ids=[drawn for step in steps for drawn in step.token_ids],
        logprobs=[one for step in steps for one in step.logprobs or ()],
        prompt_logprobs=[one for step in steps for one in step.prompt_logprobs or ()],
        cached_tokens=steps[0].cached_tokens,
        timings=None,
    )
    return msgspec.to_builtins(msgspec.structs.replace(whole, request_id=""))


def flat(value):
    """Return the numbers and strings of nested values."""
    if isinstance(value, dict):
        return [one for key in value for one in (key, *flat(value[key]))]
    return [one for part in value for one in flat(part)] if isinstance(value, list | tuple) else [value]


async def test_answers_are_the_same_as_step_by_step(engine, start):
    """The reference is an engine in this process, whose steps are collected one by one."""
    alone, _ = load_engine(start, ALONE)
    expected = []
    for number, params in enumerate(REQUESTS):
        assert alone.add(Add(str(number), (PROMPT + number).tobytes(), params)) is None
        steps = [one for _ in iter(alone.has_work, False) for one in alone.step().progress]
        assert all(len(step.token_ids) <= 1 for step in steps)
        expected.append(joined(steps))

    async def answer(number):
        stream = engine.generate(f"request {number}", PROMPT + number, REQUESTS[number])
        return [progress async for progress in stream]

    largest = 0
    while largest < 2:  # on a busy machine, all steps of an attempt may be slow
        answers = await asyncio.gather(*map(answer, range(len(REQUESTS))))
        for steps, one in zip(answers, expected, strict=True):
            assert len(steps[0].token_ids) <= 1, "the first token is not held"
            assert flat(joined(steps)) == pytest.approx(flat(one), abs=1e-4)
            largest = max(largest, *(len(step.token_ids) for step in steps))


class Regrouped:
    """An engine whose tokens are collected again, as if each step took `step_s` seconds."""

    def __init__(self, engine: AsyncEngine, step_s: float) -> None:
        self._engine = engine
        self._step_s = step_s
        self.sizes: list[int] = []
        """Number of tokens of each progress."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def generate(self, *arguments: object) -> AsyncGenerator[Progress, None]:
        clock = Clock()
        collector = ProgressCollector(clock)
        async with aclosing(self._engine.generate(*arguments)) as steps:
            async for step in steps:
                for one in singles(step):
                    clock.now_s += self._step_s
                    sent = collector.add(Stepped([one], Stats(num_running=1)))
                    for progress in sent.progress if sent else ():
                        self.sizes.append(len(progress.token_ids))
                        yield progress


def singles(step):
    """Return the progress of each token."""
    last = len(step.token_ids) - 1
    for index, token_id in enumerate(step.token_ids):
        logprobs = None if step.logprobs is None else [step.logprobs[index]]
        one = msgspec.structs.replace(step, token_ids=[token_id], logprobs=logprobs)
        ends = {} if index == last else {"finish_reason": None, "stop_token_id": None}
        yield msgspec.structs.replace(one, **ends)
    if not step.token_ids:
        yield step


@pytest.fixture(scope="module")
async def worker(random_checkpoint, start):
    async with await Worker.start(WorkerConfig(model=random_checkpoint, engine=start.config), in_process=True) as one:
        yield one


SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"logprobs": None}, marks=pytest.mark.slow),
        pytest.param({"include_stop_str_in_output": True}, marks=pytest.mark.slow),
        pytest.param({"min_tokens": 12}, marks=pytest.mark.slow),
        pytest.param({"skip_special_tokens": False}, marks=pytest.mark.slow),
        {"ignore_eos": False, "stop_token_ids": tuple(range(0, 328, 16))},
    ],
    ids=str,
)
async def test_a_stop_string_ends_the_answer_at_the_same_token(worker, monkeypatch, changes):
    """Every stop string from the answer is tried, with all tokens one by one, some together, and all together."""
    params = msgspec.structs.replace(SEEDED, **changes)
    engine = worker.engine

    async def answer(step_s, stop):
        regrouped = Regrouped(engine, step_s)
        monkeypatch.setattr(worker, "engine", regrouped)
        asked = msgspec.structs.replace(params, stop=stop)
        found = await worker.whole_answer(PROMPT, asked, f"{step_s} {stop}")
        found.texts, found.timings = [found.text], None
        return found, max(regrouped.sizes)

    whole, _ = await answer(1, ())
    assert (await answer(0, ()))[0] == whole
    ends = set()
    for at in range(0, len(whole.text) - 1, 3):
        stop = (whole.text[at : at + 2], "not in the answer")
        expected, largest = await answer(1, stop)
        assert largest == 1
        ends.add((len(expected.token_ids), expected.stop_reason))
        for step_s in (HOLD_S / 2, HOLD_S / 4, 0):
            found, _ = await answer(step_s, stop)
            assert found == expected
    assert len({num_tokens for num_tokens, reason in ends if isinstance(reason, str)}) > 2


class RawEngine:
    """An engine process whose messages a test reads itself."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def send(self, message: Add | Abort | Start) -> None:
        self._child.channel.send(msgspec.msgpack.encode(message))

    async def recv(self) -> Stepped:
        return msgspec.msgpack.decode(await self._child.channel.recv(), type=Stepped)

    async def tokens_of(self, *request_ids: str) -> None:
        """Wait until each request has several tokens."""
        missing = dict.fromkeys(request_ids, 4)
        while any(number > 0 for number in missing.values()):
            for one in (await self.recv()).progress:
                missing[one.request_id] -= len(one.token_ids)

    async def running(self, number: int) -> None:
        """Wait until `number` requests run."""
        while (await self.recv()).stats.num_running != number:
            pass


@pytest.fixture(scope="module")
async def raw_engine(start):
    child = await Child.start("mindie_mm.engine.process.engine_process")
    try:
        raw = RawEngine(child)
        raw.send(start)
        await child.ready(Ready, "the engine")
        yield raw
    finally:
        await child.close()


@pytest.mark.parametrize("others", [0, 1, 3])
async def test_an_abort_takes_effect_at_once(raw_engine, others):
    names = [f"other {number}" for number in range(others)]
    times_s = []
    for attempt in range(10):
        for name in names:
            raw_engine.send(Add(f"{name} {attempt}", PROMPT.tobytes(), ENDLESS))
        raw_engine.send(Add(f"aborted {attempt}", PROMPT.tobytes(), ENDLESS))
        await raw_engine.tokens_of(*(f"{name} {attempt}" for name in (*names, "aborted")))
        asked_s = time.monotonic()
        raw_engine.send(Abort(f"aborted {attempt}"))
        await raw_engine.running(others)
        times_s.append(time.monotonic() - asked_s)
        for name in names:
            raw_engine.send(Abort(f"{name} {attempt}"))
        if names:
            await raw_engine.running(0)
    assert min(times_s) < ABORT_S, "the fastest attempt, because the machine may be busy"


async def test_an_idle_engine_holds_no_tokens(raw_engine):
    for attempt in range(10):
        raw_engine.send(Add(f"a {attempt}", PROMPT.tobytes(), ENDLESS))
        await raw_engine.tokens_of(f"a {attempt}")
        raw_engine.send(Abort(f"a {attempt}"))
        await raw_engine.running(0)
        raw_engine.send(Add(f"b {attempt}", PROMPT.tobytes(), msgspec.structs.replace(GREEDY, max_tokens=1)))
        stepped = await raw_engine.recv()
        assert [(one.request_id, len(one.token_ids)) for one in stepped.progress] == [(f"b {attempt}", 1)]
