"""Work beside other work, of which nothing is left running, however often it is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks, of which the first failure ends the others, and is then raised as it is, in no group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
        return
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    raise failure  # out there it keeps its own cause


async def gather(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order; the first failure ends the others before it is raised."""
    async with task_group() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


def beside(work: Callable[[], T]) -> T:
    """Return `work()`, done in a thread of its own: for work that needs an event loop, whose caller may be in one.

    RuntimeError where no thread can be started, as when the interpreter ends.
    """
    done: Future[T] = Future()
    threading.Thread(target=_do, args=(work, done), daemon=True).start()
    return done.result()


class WorkThread:
    """A thread that does one work after another, for any event loop, up to the very end of the interpreter.

    Executors take no work once the main thread has ended, though other threads may go on for hours. It is a daemon, so
    whoever has one closes it before the interpreter ends.
    """

    def __init__(self, name: str) -> None:
        self._works = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """Return `work()`. When cancelled, what has begun goes on, and nobody has its result; the rest is not done."""
        done: Future[T] = Future()
        self._works.put((work, done))
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        """Take no further work; the thread ends behind what it was given before. Idempotent."""
        self._works.put(None)

    def close(self) -> None:
        """Stop, and wait for the end of the thread. Idempotent."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while (given := self._works.get()) is not None:
            work, done = given
            if done.set_running_or_notify_cancel():
                _do(work, done)
            del given, work, done  # while it waits for the next one, nothing of this one lives


def _do(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever waits has it
        done.set_exception(error)


async def in_thread(work: Callable[[], T]) -> T:
    """`work()` in a thread; when cancelled, waits for it, so that nothing writes into a directory being removed.

    What has not begun by then is not done.
    """
    is_wanted = True

    def begin() -> T | None:
        return work() if is_wanted else None

    running = asyncio.ensure_future(asyncio.to_thread(begin))
    try:
        return cast("T", await asyncio.shield(running))
    except asyncio.CancelledError:
        is_wanted = False
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise
