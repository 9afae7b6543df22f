"""GET /v1/models and /v1/models/{name}."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response
from typing_extensions import TypedDict

from mindie_mm.nn.checkpoint.demo import demo_note
from service.http.json_response import JSONResponse
from service.request.state import Service, ServiceDep
from service.schemas.description import answered

router = APIRouter()


class ModelCard(TypedDict):
    """The description of the served model that clients of OpenAI and vLLM expect."""

    id: str
    object: Literal["model"]
    created: int
    """Unix time at which the service started."""
    owned_by: str
    root: str
    """Name of the model, or folder of the LoRA adapter."""
    parent: str | None
    """Name of the model that a LoRA adapter changes, or null for the model."""
    max_model_len: int
    note: str | None
    """A note for users: the tasks of the embedded model, or null for other models."""


class ModelList(TypedDict):
    """The served model, once for each of its names, and its LoRA adapters."""

    object: Literal["list"]
    data: list[ModelCard]


@router.get("/v1/models", responses=answered(ModelList))
async def models(service: ServiceDep) -> Response:
    """List the served model, once for each of its names, and its LoRA adapters."""
    names = (*service.model_names, *(one.name for one in service.worker.loras))
    listed: ModelList = {"object": "list", "data": [_card(service, name) for name in names]}
    return JSONResponse(listed)


@router.get("/v1/models/{name:path}", responses=answered(ModelCard))
async def model(name: str, service: ServiceDep) -> Response:
    """Return the served model or one of its LoRA adapters."""
    service.require_listed(name)
    return JSONResponse(_card(service, name))


def _card(service: Service, name: str) -> ModelCard:
    loras = service.worker.loras
    lora = loras.get(name) if name in loras else None
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mindie_mm",
        "root": service.model_name if lora is None else str(lora.folder),
        "parent": None if lora is None else service.model_name,
        "max_model_len": service.worker.engine.info.max_model_len,
        "note": demo_note(service.worker.config.model),
    }
