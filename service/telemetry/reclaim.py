"""Freeing what the dead have left, at the start and from time to time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mindie_mm.processes.restarts import logged
from mindie_mm.shm import collect

_log = logging.getLogger(__name__)


@asynccontextmanager
async def reclaiming(spool: Path, interval_s: float) -> AsyncIterator[None]:
    """Collects now and every `interval_s` seconds: dead owners' arenas, dead services' requests in `spool`."""
    await _collect(spool)
    task = asyncio.create_task(_repeat(spool, interval_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _repeat(spool: Path, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await _collect(spool)


async def _collect(spool: Path) -> None:
    with logged("shared memory cannot be reclaimed"):  # now; it may be later, and serving goes on
        found = await asyncio.to_thread(collect, [spool])
        if found.reclaimed:
            _log.warning("reclaimed %d bytes of shared memory from dead processes: %s", found.num_bytes, found.counts)
