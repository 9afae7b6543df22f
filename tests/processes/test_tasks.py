"""Tests for concurrent work that is canceled or fails."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mindie_mm.errors import MediaError, SharedMemoryError
from mindie_mm.processes.alone import gather_in_order, run_alone
from mindie_mm.processes.tasks import gather, in_thread, off_loop


async def test_cancelled_work_waits_for_its_threads() -> None:
    """The threads of nested work are awaited, too, because their outputs are removed afterwards."""
    started, may_end = threading.Semaphore(0), threading.Event()
    ended: list[int] = []

    def write(number: int) -> None:
        started.release()
        may_end.wait(120)
        ended.append(number)

    async def item(numbers: range) -> list[None]:
        return await gather([in_thread(lambda number=number: write(number)) for number in numbers])

    work = asyncio.ensure_future(gather([item(range(2)), item(range(2, 4))]))
    for _ in range(4):
        await asyncio.to_thread(started.acquire)
    for _ in range(3):
        work.cancel()
        await asyncio.sleep(0.01)
        assert not work.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert sorted(ended) == [0, 1, 2, 3]


async def test_cancelled_work_that_waits_for_a_thread_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canceled work must not occupy a thread, because the work of other requests would have to wait for this thread."""
    began, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "_default_executor", ThreadPoolExecutor(1))  # the loop also runs later tests
    done: list[int] = []

    def first() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait(120)
        done.append(0)

    works = [in_thread(first), *(in_thread(lambda: done.append(1)) for _ in range(9))]
    work = asyncio.ensure_future(gather(works))
    await began.wait()
    work.cancel()
    await asyncio.sleep(0.01)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert done == [0]


async def test_the_first_failure_cancels_the_others_and_keeps_its_cause() -> None:
    forever = asyncio.Event()

    async def fail() -> None:
        raise SharedMemoryError("no room") from OSError("full")

    async def wait() -> None:
        try:
            await forever.wait()
        finally:
            forever.set()

    with pytest.raises(SharedMemoryError, match="no room") as caught:
        await gather([wait(), fail()])
    assert isinstance(caught.value.__cause__, OSError)
    assert forever.is_set()


async def test_the_first_failure_in_order_is_raised_however_late_it_comes():
    later_has_failed, ended = asyncio.Event(), []

    async def late() -> None:
        await later_has_failed.wait()
        raise ValueError("first in order")

    async def early() -> None:
        later_has_failed.set()
        raise KeyError("earlier in time")

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("last")

    with pytest.raises(ValueError, match="first in order"):
        await gather_in_order([late(), early(), endless()])
    assert ended == ["last"]


async def _doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * await off_loop(1 << 30, lambda: number)


async def test_run_alone_runs_one_work_after_another_inside_another_event_loop() -> None:
    assert run_alone(gather_in_order([_doubled(number) for number in range(3)])) == [0, 2, 4]
    assert await gather_in_order([_doubled(number) for number in range(3)]) == [0, 2, 4]


def test_run_alone_raises_the_first_error_and_runs_no_further_work() -> None:
    begun: list[int] = []

    async def fail(number: int) -> None:
        begun.append(number)
        raise SharedMemoryError(f"number {number}")

    with pytest.raises(SharedMemoryError, match="number 0"):
        run_alone(gather_in_order([fail(0), fail(1)]))
    assert begun == [0]


async def test_the_error_of_work_in_a_thread_whose_caller_is_canceled_is_not_logged() -> None:
    begun, leave = threading.Event(), threading.Event()
    logged: list[dict[str, Any]] = []

    def work() -> None:
        begun.set()
        leave.wait()
        raise MediaError("the file is gone")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(context))
    task = asyncio.create_task(in_thread(work, leave.set))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    gc.collect()
    assert not logged
