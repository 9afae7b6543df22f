"""Work beside other work, of which nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def gather(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Their results, in order; the first failure ends the others before it is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(work: Callable[[], T]) -> T:
    """`work()` in a thread; when cancelled, waits for it, so that nothing writes into a directory being removed."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
