"""Freeing what the dead have left, at the start and from time to time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mindie_mm.errors import MindieMMError
from mindie_mm.shm import collect

_log = logging.getLogger(__name__)


@asynccontextmanager
async def reclaiming(spool: Path, interval_s: float) -> AsyncIterator[None]:
    """Collects now and every `interval_s` seconds: dead owners' arenas, dead services' requests in `spool`."""
    await asyncio.to_thread(_collect, spool)
    task = asyncio.create_task(_repeat(spool, interval_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _repeat(spool: Path, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(_collect, spool)


def _collect(spool: Path) -> None:
    try:
        found = collect([spool])
    except (MindieMMError, OSError) as error:  # what cannot be reclaimed now may be later; serving goes on
        _log.warning("reclaiming shared memory: %s", error)
        return
    if found.reclaimed:
        _log.warning("reclaimed %d bytes of the dead: %s", found.num_bytes, found.counts)
