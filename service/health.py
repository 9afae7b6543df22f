"""GET /health, /health/live, /metrics and /shm: how the service is."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from mindie_mm.shm import survey
from service.json_response import JSONResponse
from service.state import ServiceDep

router = APIRouter()


@router.get("/health")
async def health(service: ServiceDep) -> Response:
    """200 if a request would be answered, else 503."""
    return Response(status_code=200 if service.healthy else 503)


@router.get("/health/live")
async def live() -> Response:
    """200 as long as the process answers."""
    return Response(status_code=200)


@router.get("/metrics")
async def metrics(service: ServiceDep) -> Response:
    """Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
