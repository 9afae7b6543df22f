"""Helpers for concurrent tasks and threads. After a cancellation, no task continues to run."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from mindie_mm.processes.alone import has_loop

T = TypeVar("T")

_INLINE_BYTES = 2**20
"""Maximum number of bytes to hash or copy on an event loop. This takes less than 0.5 ms."""


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group. The first exception cancels the other tasks, and is raised without an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
        return
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    raise failure  # outside the `except` block, so that it keeps its own cause


async def gather(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of the coroutines `works`, in order. The first exception cancels the others and is raised."""
    if len(works) == 1:  # a single coroutine needs no task, which would take time in each request
        return [await works[0]]
    async with task_group() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


def beside(work: Callable[[], T], check: Callable[[], None], period_s: float) -> T:
    """Run `work` in a new thread and return its result. `work` may run an event loop even if the caller is inside one.

    Until `work` ends, call `check` every `period_s` seconds. If `check` raises an exception, stop waiting and raise it,
    while the thread continues.

    Raise RuntimeError if no thread can be started, for example because the interpreter is shutting down.
    """
    done: Future[T] = Future()
    threading.Thread(target=_do, args=(work, done), daemon=True).start()
    while not wait([done], period_s).done:
        check()
    return done.result()


class WorkThread:
    """A thread that runs jobs one after another. Any event loop may submit jobs, until the interpreter exits.

    An executor does not accept jobs after the main thread has ended, although other threads may run for hours. A
    WorkThread is a daemon thread, so its owner must close it before the interpreter exits.
    """

    def __init__(self, name: str) -> None:
        self._works = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread and return its result.

        If the caller is canceled while the job runs, the job continues and its result is dropped. If the job has not
        begun, it never runs.
        """
        done: Future[T] = Future()
        self._works.put((work, done))
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        """Let the thread end after it has run all jobs submitted so far. Idempotent."""
        self._works.put(None)

    def close(self) -> None:
        """Stop the thread and wait until it has ended. Idempotent."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while (given := self._works.get()) is not None:
            work, done = given
            if done.set_running_or_notify_cancel():
                _do(work, done)
            del given, work, done  # do not keep a finished job alive while waiting for the next one


def _do(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - the future passes the exception to the caller
        done.set_exception(error)


async def in_thread(work: Callable[[], T], give_up: Callable[[], object] | None = None) -> T:
    """Run `work` in a thread and return its result.

    If the caller is canceled after the work has begun, call `give_up` to shorten the work, and wait until the work
    ends. Without this wait, the work might write to a directory that is being removed. If the work has not begun, it
    never runs.

    While the interpreter shuts down, no thread can be started. `work` then runs on the event loop and blocks it.
    """
    is_wanted = True

    def begin() -> T | None:
        return work() if is_wanted else None

    in_context = partial(contextvars.copy_context().run, begin)
    try:
        running = asyncio.get_running_loop().run_in_executor(None, in_context)
    except RuntimeError:  # the interpreter is shutting down
        return work()
    try:
        return cast("T", await asyncio.shield(running))
    except asyncio.CancelledError:
        is_wanted = False
        if give_up is not None:
            give_up()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # otherwise, the event loop would log it
        raise


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Run `work`, which processes `num_bytes` bytes, and return its result. Use a thread if `num_bytes` is large."""
    return work() if num_bytes <= _INLINE_BYTES or not has_loop() else await in_thread(work)
