"""Freeing what the dead have left, at the start and from time to time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from mindie_mm.errors import MindieMMError
from mindie_mm.shm import Collected, collect

_log = logging.getLogger(__name__)


@asynccontextmanager
async def reclaiming(spool: Path, interval_s: float, count: Callable[[Collected], None]) -> AsyncIterator[None]:
    """Collects now and every `interval_s` seconds: dead owners' arenas, dead services' requests in `spool`.

    `count` is told what was collected, on a thread.
    """
    await asyncio.to_thread(_collect, spool, count)
    task = asyncio.create_task(_repeat(spool, interval_s, count))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _repeat(spool: Path, interval_s: float, count: Callable[[Collected], None]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(_collect, spool, count)


def _collect(spool: Path, count: Callable[[Collected], None]) -> None:
    try:
        found = collect([spool])
    except (MindieMMError, OSError) as error:  # what cannot be reclaimed now may be later; serving goes on
        _log.warning("reclaiming shared memory: %s", error)
        return
    count(found)
    if found.reclaimed:
        _log.warning("reclaimed %d bytes of the dead: %s", found.num_bytes, found.counts)
