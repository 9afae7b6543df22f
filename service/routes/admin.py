"""POST /admin/reload: replacement of the engine processes and of the API keys."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from hmac import compare_digest

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from mindie_mm.errors import ServiceStopping
from mindie_mm.settings.config import ServiceConfig
from service.http.access import RELOAD, key_digest
from service.http.json_response import JSONResponse
from service.request.state import ServiceDep
from service.schemas.description import answered

router = APIRouter()


class Reloaded(TypedDict):
    """The response of /admin/reload."""

    reloaded: int
    """Number of engines that were replaced."""


@router.post(RELOAD, responses=answered(Reloaded))
async def reload(request: Request, service: ServiceDep) -> Response:
    """Replace the engines one by one, and answer when all are replaced. New engines read the checkpoint again.

    The file of `--api-key-file` is read again before. If it is invalid, nothing is replaced.

    An engine that is replaced gets no new requests. Its running requests may finish within `--grace-s`, and are then
    sent to another engine.
    """
    require_admin(request, service.config)
    if service.admission.stopping:
        raise ServiceStopping("the service is stopping")
    try:
        await service.reload()
    except asyncio.CancelledError:
        if service.admission.stopping:  # the server cancels the requests that remain after the grace time
            raise ServiceStopping("the service stopped before all engines were replaced") from None
        raise
    answer: Reloaded = {"reloaded": len(service.worker.engine.engines)}
    return JSONResponse(answer)


def require_admin(request: Request, config: ServiceConfig) -> None:
    """Raise HTTPException unless the request came through the Unix socket, or has the key of `admin_key`."""
    if getattr(request.state, "unix_socket", False) is True:
        return
    if config.admin_key is None:
        raise HTTPException(
            403,
            f"{request.scope['path']} is accepted only on the socket of --uds, or with the key of --admin-key; this "
            "service has no such key",
        )
    if not compare_digest(key_digest(request.headers), sha256(config.admin_key.encode()).digest()):
        message = "the request does not have the key of --admin-key; send it in the header Authorization, as Bearer KEY"
        raise HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})
