"""What becomes of a tokenizer process, and of who waits behind, when the request in work is given up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from mindie_mm.config import WorkerConfig
from mindie_mm.shm import release, survey
from mindie_mm.tokenize import TokenizeRequest, TokenizerPool
from mindie_mm.tokenize import pool as pool_module
from tests.media_samples import encode_video, encoded, moving_frames, photograph
from tests.models import test_chameleon

GIVEN_UP_S = 0.3
SMALL = TokenizeRequest(text="hello")
A_SECOND_OF_WORK = TokenizeRequest(text="what is it? " * 500_000)

pytestmark = pytest.mark.usefixtures("copied_workers")


@pytest.fixture
async def pool(checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TokenizerPool]:
    """One process, which has `GIVEN_UP_S` for a request that was given up."""
    monkeypatch.setattr(pool_module, "GIVEN_UP_S", GIVEN_UP_S)
    pool = await TokenizerPool.start(checkpoint_path, WorkerConfig(arena_bytes=16 * 2**20))
    yield pool
    await pool.close()


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """The process does not go on with what it has in work."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


async def sent(pool: TokenizerPool, *requests: TokenizeRequest) -> list[asyncio.Task]:
    """Tasks that tokenise `requests`, which lie in this order before the process."""
    tasks = [asyncio.create_task(pool.tokenize(request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def gone(pool: TokenizerPool, pid: int) -> None:
    """Waits until another process takes requests."""
    async with asyncio.timeout(300):
        while pool.pids in ([], [pid]):  # noqa: ASYNC110 - the pool tells nobody of it
            await asyncio.sleep(0.01)


def owners() -> set[int]:
    """Pids whose arenas are in /dev/shm."""
    return {arena.owner.pid for arena in survey() if arena.owner}


async def test_another_process_takes_what_waits_behind_one_that_hangs(
    pool: TokenizerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (pid,) = pool.pids
    picture = {"image": encoded(photograph("chelsea.png", (150, 120)))}
    path_file = tmp_path / "shm_name.txt"
    with_picture = TokenizeRequest(items=[picture], path_file=str(path_file))
    assert len((await pool.tokenize(with_picture)).spans) == 1
    assert pid in owners()
    with hung(pid):
        hanging, *others = await sent(pool, with_picture, SMALL, with_picture, SMALL)
        hanging.cancel()
        async with asyncio.timeout(300):
            prompts = await asyncio.gather(*others)
    assert [len(prompt.spans) for prompt in prompts] == [0, 1, 0]
    assert not psutil.pid_exists(pid)
    assert pid not in owners()
    assert pool.restarts.started == 1
    assert f"tokenizer process {pid} is killed: it has worked for 0.3 s on a request that was given up" in caplog.text
    release(path_file)
    assert not any(arena.blocks for arena in survey() if arena.owner and arena.owner.pid in pool.pids)


async def test_the_blocks_of_a_given_up_request_are_freed_when_its_answer_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where an item's run begins with a start token, in front of its words."""
    test_chameleon.TestChameleon.write_checkpoint(tmp_path)
    picture = {"image": encoded(photograph("chelsea.png", (48, 40)))}
    with_picture = TokenizeRequest(items=[picture], path_file=str(tmp_path / "shm_name.txt"))
    pool = await TokenizerPool.start(tmp_path, WorkerConfig(arena_bytes=16 * 2**20))
    try:
        (pid,) = pool.pids
        prompt = await pool.tokenize(with_picture)
        (span,) = prompt.spans
        assert prompt.ids[span.start] >= 0
        with hung(pid):
            (given_up,) = await sent(pool, with_picture)
            given_up.cancel()
            await asyncio.sleep(0)
        await pool.tokenize(SMALL)
        (arena,) = (arena for arena in survey() if arena.owner and arena.owner.pid == pid)
        assert len(arena.blocks) == 1
        assert not caplog.records
    finally:
        await pool.close()


async def test_a_cancelled_request_that_has_not_begun_kills_no_process(
    pool: TokenizerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor over one that it answers in time."""
    (pid,) = pool.pids
    with hung(pid):
        in_work, behind = await sent(pool, SMALL, SMALL)
        behind.cancel()
        await asyncio.sleep(3 * GIVEN_UP_S)
    await in_work
    await pool.tokenize(SMALL)
    with hung(pid):
        (in_work,) = await sent(pool, SMALL)
        await asyncio.sleep(3 * GIVEN_UP_S)  # the time of the one before it is over
    await in_work
    monkeypatch.setattr(pool_module, "GIVEN_UP_S", 600.0)  # enough even on a busy machine
    with hung(pid):
        (cancelled,) = await sent(pool, SMALL)
        cancelled.cancel()
        await asyncio.sleep(0)
        assert [process._grace is None for process in pool._processes] == [False]
    await pool.tokenize(SMALL)
    assert [process._grace for process in pool._processes] == [None], "its time ends with its answer"
    assert pool.pids == [pid]
    assert pool.restarts.started == 0


async def test_a_request_that_was_given_up_before_it_was_begun_is_not_begun(
    pool: TokenizerPool, tmp_path: Path
) -> None:
    """No line of it is in its path file."""
    (pid,) = pool.pids
    path_file = tmp_path / "shm_name.txt"
    picture = {"image": encoded(photograph("chelsea.png", (150, 120)))}
    with hung(pid):
        first, behind, last = await sent(pool, SMALL, TokenizeRequest(items=[picture], path_file=str(path_file)), SMALL)
        behind.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(first, last)
    assert not path_file.exists()
    assert pool.pids == [pid]


async def test_decoding_ends_with_its_request(
    pool: TokenizerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of its videos; the process goes on, and nothing of it is left."""
    monkeypatch.setattr(pool_module, "GIVEN_UP_S", 60.0)
    video = encode_video(np.tile(moving_frames(60, 320, 240), (40, 1, 1, 1)), container="avi", codec="mpeg4")
    path_file = tmp_path / "shm_name.txt"
    # What lies behind a video makes it another, which no cache knows.
    videos = [{"video": video + bytes(index), "num_frames": 4} for index in range(16)]
    request = TokenizeRequest(items=videos[:8], path_file=str(path_file))
    another = TokenizeRequest(items=videos[8:], path_file=str(path_file))
    (pid,) = pool.pids

    def used_s() -> float:
        return psutil.Process(pid).cpu_times().user

    start = used_s()
    await pool.tokenize(request)
    whole_s = used_s() - start
    release(path_file)
    start = used_s()
    (given_up,) = await sent(pool, another)
    async with asyncio.timeout(300):
        while used_s() - start < 0.3 * whole_s:  # noqa: ASYNC110 - the process tells nobody of it
            await asyncio.sleep(0.01)
    given_up.cancel()
    assert len(await pool.tokenize(SMALL)) > 0
    assert used_s() - start < 0.7 * whole_s
    assert pool.pids == [pid]
    assert not any(arena.blocks for arena in survey() if arena.owner and arena.owner.pid == pid)


async def test_who_is_in_work_when_a_process_is_ended_over_another_is_not_failed(pool: TokenizerPool) -> None:
    """The answer to the one that was given up has come, and was not read in time: the pool was held up."""
    (pid,) = pool.pids
    with hung(pid):
        cancelled, in_work = await sent(pool, SMALL, A_SECOND_OF_WORK)
        cancelled.cancel()
        await asyncio.sleep(0)
    time.sleep(1.5 * GIVEN_UP_S)  # noqa: ASYNC251 - nothing else is to run
    async with asyncio.timeout(300):
        assert len(await in_work) > 0
    assert pool.pids != [pid]


async def test_a_request_given_up_behind_another_lengthens_no_ones_time(pool: TokenizerPool) -> None:
    """Else who gives up one after another would keep the process."""
    (pid,) = pool.pids
    with hung(pid):
        (hanging,) = await sent(pool, SMALL)
        hanging.cancel()
        async with asyncio.timeout(300):
            while pool.pids == [pid]:
                (further,) = await sent(pool, SMALL)
                further.cancel()
                await asyncio.sleep(GIVEN_UP_S / 10)
            while psutil.pid_exists(pid):  # noqa: ASYNC110 - killed, and reaped soon
                await asyncio.sleep(0.01)


async def test_processes_ended_one_after_another_are_started_again_without_a_pause(
    pool: TokenizerPool, caplog: pytest.LogCaptureFixture
) -> None:
    """None of them has answered anything, and that is no sign that the next one will not."""
    for _ in range(2):
        (pid,) = pool.pids
        with hung(pid):
            (hanging,) = await sent(pool, SMALL)
            hanging.cancel()
            await gone(pool, pid)
    assert pool.restarts.started == 2
    assert "is started again in" not in caplog.text
