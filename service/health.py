"""GET /health, /health/live, /version, /metrics and /shm: how the service is."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from mindie_mm.shm import ArenaInfo, arenas_of
from mindie_mm.shm.layout import block_name
from service.json_response import JSONResponse
from service.state import ServiceDep

router = APIRouter()


@router.get("/health")
@router.get("/v2/health/ready")  # MindIE's
@router.get("/ping")  # vLLM's
async def health(service: ServiceDep) -> Response:
    """200 if a request would be answered, else 503 and the reason; and how far each arena is faulted in."""
    service.check_healthy()
    arenas = await asyncio.to_thread(arenas_of, service.worker.tokenizer_stage.pids)
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
@router.get("/v2/health/live", response_class=Response)  # MindIE's
async def live() -> Response:
    """200 as long as the process answers."""
    return Response(status_code=200)


@router.get("/version")
async def own_version() -> Response:
    """Of mindie_mm, where clients of vLLM look for its own."""
    return JSONResponse({"version": version("mindie_mm")})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceDep) -> Response:
    """Prometheus' text format."""
    return Response(await asyncio.to_thread(service.metrics.text), media_type=CONTENT_TYPE_LATEST)


@router.get("/shm")
async def shm(service: ServiceDep, blocks: bool = False) -> Response:
    """The shared memory of this service's tokenizers; bytes are those in blocks that nobody freed.

    With `blocks=true` each arena says in `map` which blocks those are, and where they lie.
    """
    arenas = await asyncio.to_thread(arenas_of, service.worker.tokenizer_stage.pids, described=blocks)
    return JSONResponse(
        {
            "blocks": sum(len(arena.blocks) for arena in arenas),
            "bytes": sum(arena.used_bytes for arena in arenas),
            "capacity_bytes": sum(arena.capacity_bytes for arena in arenas),
            "arenas": [_arena(arena) | ({"map": _map(arena)} if blocks else {}) for arena in arenas],
        }
    )


def _arena(arena: ArenaInfo) -> dict[str, Any]:
    return {
        "name": arena.name,
        "pid": arena.owner.pid if arena.owner else None,
        "age_s": arena.age_s,
        "blocks": len(arena.blocks),
        "bytes": arena.used_bytes,
        "peak_bytes": arena.stats.peak_bytes if arena.stats else None,
        "capacity_bytes": arena.capacity_bytes,
        "populated": arena.populated_fraction,
    }


def _map(arena: ArenaInfo) -> list[dict[str, Any]]:
    return [
        {
            "name": block_name(arena.number, block.block),
            "state": block.state,
            "request": Path(block.request).parent.name or None,
            "age_s": block.age_s,
            "lease_s": block.lease_s,
            "bytes": block.num_bytes,
            "pieces": block.pieces,
            "arrays": {name: {"dtype": spec.dtype, "shape": spec.shape} for name, spec in block.arrays.items()},
        }
        for block in arena.blocks
    ]
