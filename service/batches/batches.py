"""The batches that this process runs: new ones, and those that another process or an earlier one left unfinished."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from mindie_mm.processes.restarts import logged
from mindie_mm.processes.tasks import in_thread
from service.batches.record import Batch
from service.batches.run import BatchRun, Means
from service.batches.store import BatchStore

_log = logging.getLogger(__name__)

_LATE_S = 0.1
"""Time in seconds after its expiry at which a batch that waits is ended."""
_REST = 20
"""Shortest pause between two searches for expired files, as a multiple of the time that a search takes."""


class Batches:
    """Runs one batch of each API key at a time. Locks in the folder make this hold for all processes that share it.

    A process searches for unfinished batches when it starts, and then periodically, because the process that ran a
    batch may have died. It only continues batches of the model that it serves, but ends any that is cancelled or
    expired.
    """

    def __init__(self, store: BatchStore, means: Means) -> None:
        self.store = store
        self._means = means
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    @asynccontextmanager
    async def running(self, interval_s: float) -> AsyncIterator[None]:
        """Run unfinished batches during the `with` block. Search for further ones every `interval_s` seconds.

        Files that have expired are removed, too.
        """
        always = [asyncio.create_task(self._search(interval_s)), asyncio.create_task(self._clean(interval_s))]
        try:
            yield
        finally:
            tasks = [*always, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(self, interval_s: float) -> None:
        while True:
            with logged("unfinished batches cannot be searched for"):
                for owner, batch in await in_thread(lambda: [*self.store.unfinished()]):
                    self.start(owner, batch)
            await asyncio.sleep(interval_s)

    async def _clean(self, interval_s: float) -> None:
        while True:
            began = time.monotonic()
            with logged("files that have expired cannot be removed"):
                for owner in await in_thread(self.store.files.owners):
                    await in_thread(partial(self.store.files.clean, owner))
            took_s = time.monotonic() - began
            await asyncio.sleep(max(interval_s, _REST * took_s))

    def start(self, owner: str, batch: Batch) -> None:
        """Run a batch unless it is being run. It waits for the key's other batches until it expires."""
        if (owner, batch.id) not in self._tasks:
            self._create_task((owner, batch.id), self._run_in_turn(owner, batch))

    def cancel(self, owner: str, batch: Batch) -> None:
        """End a batch that has been cancelled, even if it waits for other batches."""
        key = (owner, f"{batch.id} now")
        if key not in self._tasks:
            self._create_task(key, self._run(owner, batch, is_turn=False))

    def _create_task(self, key: tuple[str, str], work: Coroutine[Any, Any, None]) -> None:
        async def logging_errors() -> None:
            with logged(f"the batch {key[1]} is interrupted, and will be continued"):
                await work

        task = self._tasks[key] = asyncio.create_task(logging_errors())
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _run_in_turn(self, owner: str, batch: Batch) -> None:
        if batch.model not in self._means.model_names:
            _log.debug("the batch %s waits for a service with the model %s", batch.id, batch.model)
            await self._run(owner, batch, is_turn=False)
            return
        turn = self._turns.setdefault(owner, asyncio.Lock())
        try:
            async with asyncio.timeout(max(0, batch.expires_at - time.time()) + _LATE_S):
                await turn.acquire()
        except TimeoutError:
            await self._run(owner, batch, is_turn=False)
            return
        try:
            lock = await in_thread(lambda: self.store.lock(owner))
            try:
                await self._run(owner, batch, is_turn=lock is not None)
            finally:
                if lock is not None:
                    lock.close()
        finally:
            turn.release()

    async def _run(self, owner: str, batch: Batch, *, is_turn: bool) -> None:
        """Run a batch.

        If `is_turn` is false, another batch of the key is running, so that this one may only be ended, if it was
        cancelled or has expired.
        """
        folder = self.store.folder(owner, batch.id)
        if not is_turn and await in_thread(lambda: folder.ending(batch)) is None:
            return  # before the lock, because another process could try to lock the batch at the same time
        lock = await in_thread(folder.lock)
        if lock is None:
            return
        try:
            stored = await in_thread(folder.read)
            if stored is None or stored.has_ended:
                return
            _log.info("the batch %s is %s", stored.id, stored.status)
            await BatchRun(folder, stored, self._means).run()
            counts = stored.total, stored.completed, stored.failed
            _log.info("the batch %s is %s: %d requests, %d completed, %d failed", stored.id, stored.status, *counts)
        finally:
            lock.close()
