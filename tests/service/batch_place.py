"""A store of files and batches with a model that needs no engine, for tests for batches on disk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mindie_mm.settings.config import ServiceConfig
from mindie_mm.shm import make_spool
from service.batches.record import Batch
from service.batches.requests import Limits
from service.batches.run import BatchRun, Means
from service.batches.store import BatchFolder, BatchStore, new_id
from service.files.store import FileStore

URL = "/v1/completions"
OWNER = "all"


class Model:
    """Answers each request with its body, and counts the answers by body."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.before: Callable[[str], Awaitable[int]] | None = None
        """Function that returns the status of an answer."""

    async def answer(self, endpoint: str, body: bytes, owner: str) -> tuple[int, str, bytes]:
        assert (endpoint, owner) == (URL, OWNER)
        self.asked.append(json.loads(body)["prompt"])
        status = 200 if self.before is None else await self.before(self.asked[-1])
        return status, "request", body


class Place:
    """A store with a model."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.files = FileStore(root, ServiceConfig(**settings))
        make_spool(self.files.uploads)
        self.store = BatchStore(self.files, 3)
        self.model = Model()
        limits = Limits(requests=100, line_bytes=1000)
        self.means = Means(self.files, self.model.answer, lambda: True, asyncio.Semaphore(2), limits, ("tiny", "alias"))

    def create(self, num_requests: int = 6, **fields: Any) -> BatchFolder:
        path = self.files.root / "in"
        lines = [
            {"custom_id": f"{i}", "method": "POST", "url": URL, "body": {"prompt": f"{i}"}} for i in range(num_requests)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        file = self.files.add(OWNER, path, filename="in", purpose="batch")
        given = {
            "model": "tiny",
            "created": time.time(),
            "expires_at": 2**40,
            "metadata": None,
            "output_expires_after_s": 3600,
        } | fields
        batch = Batch(id=new_id(), endpoint=URL, input_file_id=file.id, completion_window="24h", **given)
        return self.store.create(OWNER, batch)

    async def run(self, folder: BatchFolder) -> Batch:
        """Run a batch as a new process does."""
        lock = folder.lock()
        assert lock is not None
        try:
            batch = folder.read()
            assert batch is not None
            await BatchRun(folder, batch, self.means).run()
        finally:
            lock.close()
        ended = folder.read()
        assert ended is not None
        return ended

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        path = self.files.content(self.files.get(OWNER, file_id), OWNER)
        return [json.loads(line) for line in path.read_text().splitlines()]
