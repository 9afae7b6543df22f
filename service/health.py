"""GET /health, /health/live, /metrics and /shm: how the service is."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from mindie_mm.shm import arenas_of
from service.json_response import JSONResponse
from service.state import ServiceDep

router = APIRouter()


@router.get("/health")
async def health(service: ServiceDep) -> Response:
    """200 if a request would be answered, else 503 and the reason; and how far each arena is faulted in."""
    service.check_healthy()
    arenas = await asyncio.to_thread(arenas_of, service.worker.tokenizers.pids)
    populated = sum(arena.populated_fraction * arena.file_bytes for arena in arenas)
    return JSONResponse(
        {
            "status": "ok",
            "shared_memory": {
                "populated": populated / max(1, sum(arena.file_bytes for arena in arenas)),
                "arenas": [{"name": arena.name, "populated": arena.populated_fraction} for arena in arenas],
            },
        }
    )


@router.get("/health/live", response_class=Response)
async def live() -> Response:
    """200 as long as the process answers."""
    return Response(status_code=200)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceDep) -> Response:
    """Prometheus' text format."""
    return Response(await asyncio.to_thread(service.metrics.text), media_type=CONTENT_TYPE_LATEST)


@router.get("/shm")
async def shm(service: ServiceDep) -> Response:
    """The shared memory of this service's tokenizers; bytes are those in blocks that nobody freed."""
    arenas = await asyncio.to_thread(arenas_of, service.worker.tokenizers.pids)
    return JSONResponse(
        {
            "blocks": sum(len(arena.blocks) for arena in arenas),
            "bytes": sum(arena.used_bytes for arena in arenas),
            "capacity_bytes": sum(arena.capacity_bytes for arena in arenas),
            "arenas": [
                {
                    "name": arena.name,
                    "pid": arena.owner.pid if arena.owner else None,
                    "blocks": len(arena.blocks),
                    "bytes": arena.used_bytes,
                    "capacity_bytes": arena.capacity_bytes,
                }
                for arena in arenas
            ],
        }
    )
