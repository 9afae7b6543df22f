"""GET /health, /health/live, /version, /load, /metrics and /shm: health and metrics of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NotRequired

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from mindie_mm.shm import ArenaInfo, arenas_of
from mindie_mm.shm.format.layout import block_name
from service.http.json_response import JSONResponse
from service.render.plans import Report
from service.request.state import ServiceDep
from service.schemas.description import answered
from service.telemetry.pages import merged

router = APIRouter()


class Populated(TypedDict):
    """The faulted-in fraction of an arena, from 0 to 1."""

    name: str
    populated: float


class PopulatedMemory(TypedDict):
    """The faulted-in fraction of all arenas together, and of each arena."""

    populated: float
    arenas: list[Populated]


class EngineCount(TypedDict):
    """The number of engines, and of those that accept requests."""

    alive: int
    total: int


class Health(TypedDict):
    """The response of /health."""

    status: Literal["ok"]
    engines: EngineCount
    shared_memory: PopulatedMemory


class Load(TypedDict):
    """The response of /load."""

    server_load: int


class Version(TypedDict):
    """The response of /version."""

    version: str


class ArrayEntry(TypedDict):
    """An array of a block."""

    dtype: str
    shape: tuple[int, ...]


class BlockEntry(TypedDict):
    """A block that has not been freed. Times are in seconds."""

    name: str
    state: str
    request: str | None
    age_s: float
    bytes: int
    pieces: Sequence[tuple[int, int]]
    """Offset and length in bytes of each contiguous part of the block."""
    arrays: dict[str, ArrayEntry]


class ArenaEntry(TypedDict):
    """An arena of one of the tokenizer processes."""

    name: str
    pid: int | None
    """Process id of the owner. `pid` and `peak_bytes` are None if the arena's header is damaged."""
    age_s: float
    blocks: int
    bytes: int
    peak_bytes: int | None
    capacity_bytes: int
    populated: float
    map: NotRequired[list[BlockEntry]]


class SharedMemory(TypedDict):
    """The response of /shm."""

    blocks: int
    bytes: int
    capacity_bytes: int
    arenas: list[ArenaEntry]


@router.get("/health", responses=answered(Health))
@router.get("/v2/health/ready", responses=answered(Health))  # MindIE's path
@router.get("/ping", responses=answered(Health))  # vLLM's path
async def health(service: ServiceDep) -> Response:
    """Return 200 if the service can answer requests, else 503 with the reason.

    The response also has the number of engines and the faulted-in fraction of each arena.
    """
    await service.check_healthy()
    engine = service.worker.engine
    arenas = await asyncio.to_thread(arenas_of, service.worker.tokenizer_stage.pids)
    populated = sum(arena.populated_fraction * arena.file_bytes for arena in arenas)
    answer: Health = {
        "status": "ok",
        "engines": {"alive": engine.num_alive, "total": len(engine.engines)},
        "shared_memory": {
            "populated": populated / max(1, sum(arena.file_bytes for arena in arenas)),
            "arenas": [{"name": arena.name, "populated": arena.populated_fraction} for arena in arenas],
        },
    }
    return JSONResponse(answer)


@router.get("/health/live", response_class=Response)
@router.get("/v2/health/live", response_class=Response)  # MindIE's path
async def live() -> Response:
    """Return 200 while the process can answer at all."""
    return Response(status_code=200)


@router.get("/version", responses=answered(Version))
async def own_version() -> Response:
    """Return the version of mindie_mm, at the route that clients of vLLM use."""
    answer: Version = {"version": version("mindie_mm")}
    return JSONResponse(answer)


@router.get("/load", responses=answered(Load))  # vLLM's path
async def load(service: ServiceDep) -> Response:
    """Return the number of requests in progress, of all workers of the port."""
    own = Report(b"", len(service.admission))
    reports = [*(await service.shared.reports(own)).values()] or [own]
    return JSONResponse(Load(server_load=sum(report.num_requests for report in reports)))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceDep) -> Response:
    """Return the metrics in the text format of Prometheus. If the port has several workers, their names are labels."""
    page = await asyncio.to_thread(service.metrics.text)
    if reports := await service.shared.reports(Report(page, len(service.admission))):
        page = merged({name: report.metrics.decode() for name, report in reports.items()}, "worker").encode()
    return Response(page, media_type=CONTENT_TYPE_LATEST)


@router.get("/shm", responses=answered(SharedMemory))
async def shm(service: ServiceDep, blocks: bool = False) -> Response:
    """Return the shared memory of this service's tokenizers, with the bytes in blocks that are not freed.

    With `blocks=true`, each arena lists these blocks and their positions in `map`.
    """
    arenas = await asyncio.to_thread(arenas_of, service.worker.tokenizer_stage.pids, described=blocks)
    answer: SharedMemory = {
        "blocks": sum(len(arena.blocks) for arena in arenas),
        "bytes": sum(arena.used_bytes for arena in arenas),
        "capacity_bytes": sum(arena.capacity_bytes for arena in arenas),
        "arenas": [_arena(arena) for arena in arenas],
    }
    if blocks:
        for entry, arena in zip(answer["arenas"], arenas, strict=True):
            entry["map"] = _map(arena)
    return JSONResponse(answer)


def _arena(arena: ArenaInfo) -> ArenaEntry:
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


def _map(arena: ArenaInfo) -> list[BlockEntry]:
    return [
        {
            "name": block_name(arena.number, block.block),
            "state": block.state,
            "request": Path(block.request).parent.name or None,
            "age_s": block.age_s,
            "bytes": block.num_bytes,
            "pieces": block.pieces,
            "arrays": {name: {"dtype": spec.dtype, "shape": spec.shape} for name, spec in block.arrays.items()},
        }
        for block in arena.blocks
    ]
