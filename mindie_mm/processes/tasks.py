"""Concurrent tasks and threads that are not left running after a cancellation."""

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

T = TypeVar("T")

_INLINE_BYTES = 2**20
"""Maximum number of bytes to hash or copy on an event loop. This blocks the loop for less than 0.5 ms."""


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group. The first failure cancels the other tasks, and is then raised without an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
        return
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    raise failure  # outside the `except` block, so that it keeps its own cause


async def gather(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of `works`, in order. The first failure cancels the others and is raised."""
    async with task_group() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


async def gather_in_order(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of `works`, in order. Raise the failure that is first in order, and cancel the later works.

    The choice of the failure does not depend on the speed of each work.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return [await task for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def beside(work: Callable[[], T], check: Callable[[], None], period_s: float) -> T:
    """Run `work` in a new thread and return its result. The caller may be inside an event loop, and `work` may run one.

    `check` is called every `period_s` seconds meanwhile. If it raises an error, the thread is left to end by itself.

    Raise RuntimeError if no thread can be started, for example while the interpreter shuts down.
    """
    done: Future[T] = Future()
    threading.Thread(target=_do, args=(work, done), daemon=True).start()
    while not wait([done], period_s).done:
        check()
    return done.result()


class WorkThread:
    """A thread that runs jobs one after another, for any event loop, until the interpreter ends.

    An executor accepts no work after the main thread has ended, although other threads may run for hours. This is a
    daemon thread, so its owner must close it before the interpreter ends.
    """

    def __init__(self, name: str) -> None:
        self._works = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread and return its result.

        When cancelled, a job that has begun runs to its end, and its result is dropped. A job that waits is not run.
        """
        done: Future[T] = Future()
        self._works.put((work, done))
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        """Let the thread end after the jobs that it has. Idempotent."""
        self._works.put(None)

    def close(self) -> None:
        """Stop the thread and wait for its end. Idempotent."""
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
    except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
        done.set_exception(error)


async def in_thread(work: Callable[[], T], give_up: Callable[[], object] | None = None) -> T:
    """Run `work` in a thread and return its result.

    When cancelled, wait for work that has begun, so that it does not write into a directory that is being removed. Work
    that has not begun is not run. `give_up` is called before that wait, to shorten it.

    While the interpreter shuts down there are no threads, and the work blocks the event loop.
    """
    is_wanted = True

    def begin() -> T | None:
        return work() if is_wanted else None

    in_context = partial(contextvars.copy_context().run, begin)
    try:
        running = asyncio.get_running_loop().run_in_executor(None, in_context)
    except RuntimeError:  # the interpreter shuts down
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
        raise


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` over `num_bytes` and return its result, in a thread if it would block the event loop for long."""
    return work() if num_bytes <= _INLINE_BYTES else await in_thread(work)
