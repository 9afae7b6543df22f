"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from service.json_response import JSONResponse
from service.state import Service, ServiceDep

router = APIRouter()


@router.get("/v1/models")
async def models(service: ServiceDep) -> Response:
    """The served model, in a list."""
    return JSONResponse({"object": "list", "data": [_card(service)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, service: ServiceDep) -> Response:
    """The served model."""
    service.check_model(name)
    return JSONResponse(_card(service))


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "mindie_mm",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.worker.engine.info.max_model_len,
    }
