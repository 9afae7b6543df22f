"""Work beside other work, of which nothing is left running, however often it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
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
