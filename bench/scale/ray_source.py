"""A worker replica whose application sends chunks instead of running a model."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.scale.ray_chunks import chunks
from service.ray.worker_replica import WorkerReplica


class Source(WorkerReplica):
    """The calls are those of a worker replica."""

    def __init__(self) -> None:
        self._app = chunks  # type: ignore[assignment]
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued_tokens = 0

    async def __del__(self) -> None:
        pass

    async def check_health(self) -> None:
        pass

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"queued_tokens": self._queued_tokens}
