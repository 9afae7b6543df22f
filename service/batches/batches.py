"""The batches that this process runs: new ones, and those that another process or an earlier one left unfinished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from mindie_mm.processes.restarts import logged
from mindie_mm.processes.tasks import in_thread
from service.batches.run import BatchRun, Means
from service.batches.store import BatchStore

_log = logging.getLogger(__name__)


class Batches:
    """Runs one batch of each API key at a time. A lock in the folder of a batch keeps other processes from running it.

    A process searches for unfinished batches when it starts, and then periodically, because the process that ran a
    batch may have died.
    """

    def __init__(self, store: BatchStore, means: Means) -> None:
        self.store = store
        self._means = means
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    @asynccontextmanager
    async def running(self, interval_s: float) -> AsyncIterator[None]:
        """Run unfinished batches during the `with` block. Search for further ones every `interval_s` seconds."""
        searching = asyncio.create_task(self._search(interval_s))
        try:
            yield
        finally:
            tasks = [searching, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(self, interval_s: float) -> None:
        while True:
            with logged("unfinished batches cannot be searched for"):
                for owner, batch_id in await in_thread(lambda: [*self.store.unfinished()]):
                    self.start(owner, batch_id)
            await asyncio.sleep(interval_s)

    def start(self, owner: str, batch_id: str, *, waits: bool = True) -> None:
        """Run a batch unless it is being run. If `waits` is false, do not wait for the key's other batches."""
        key = (owner, batch_id if waits else f"{batch_id} now")
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(self._run(owner, batch_id, waits=waits))
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _run(self, owner: str, batch_id: str, *, waits: bool) -> None:
        with logged(f"the batch {batch_id} is interrupted, and will be continued"):
            if not waits:
                await self._run_locked(owner, batch_id)
                return
            turn = self._turns.setdefault(owner, asyncio.Lock())
            async with turn:
                await self._run_locked(owner, batch_id)

    async def _run_locked(self, owner: str, batch_id: str) -> None:
        folder = self.store.folder(owner, batch_id)
        lock = await in_thread(folder.lock)
        if lock is None:
            return
        try:
            batch = await in_thread(folder.read)
            if batch is None or batch.has_ended:
                return
            _log.info("the batch %s is %s", batch_id, batch.status)
            await BatchRun(folder, batch, self._means).run()
            counts = batch.total, batch.completed, batch.failed
            _log.info("the batch %s is %s: %d requests, %d completed, %d failed", batch_id, batch.status, *counts)
        finally:
            lock.close()
