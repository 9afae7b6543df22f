"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with the names, fields and answers of vLLM."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from mindie_mm.errors import InputError, NotStored, ServiceStopping
from mindie_mm.nn.lora.adapter_config import CONFIG, WEIGHTS
from mindie_mm.settings.config import MAX_LORA_NAME
from service.http.access import LOAD_LORA, UNLOAD_LORA
from service.request.state import ServiceDep
from service.routes.admin import require_admin
from service.schemas.body import Fields, pass_over_fields

router = APIRouter()
_log = logging.getLogger(__name__)

_MAX_PATH = 1024
_Name = Annotated[str, Field(min_length=1, max_length=MAX_LORA_NAME)]


class LoadBody(Fields):
    """The request of /v1/load_lora_adapter."""

    lora_name: _Name
    """Model name that requests use to select the adapter."""
    lora_path: Annotated[str, Field(min_length=1, max_length=_MAX_PATH)]
    """Folder of the adapter: a path below `--lora-dir`, absolute or relative to it."""
    load_inplace: bool = False
    """Whether to replace a loaded adapter of the same name. Its running requests finish with the old one."""


class UnloadBody(Fields):
    """The request of /v1/unload_lora_adapter."""

    lora_name: _Name
    lora_int_id: int | None = None
    """Accepted and ignored, as in vLLM."""


async def _allowed(request: Request, service: ServiceDep) -> Path:
    """Return the folder of adapters. Raise an error unless the service has one and the request has the admin's key."""
    root = service.worker.config.lora_dir
    if root is None:
        raise NotStored("this service loads no LoRA adapters while it runs; start it with --lora-dir FOLDER")
    require_admin(request, service.config)
    if service.admission.stopping:
        raise ServiceStopping("the service is stopping")
    return root


_DONE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
"""Response that says what was done. Errors are JSON, as on all routes."""
RootDep = Annotated[Path, Depends(_allowed)]


@router.post(LOAD_LORA, responses=_DONE)
async def load(body: LoadBody, root: RootDep, service: ServiceDep) -> Response:
    """Load a LoRA adapter. It is read completely, or not loaded at all.

    The route exists only with `--lora-dir`, and takes the key of `--admin-key`.
    """
    pass_over_fields(body.unknown, strict=service.config.strict)
    name = body.lora_name
    if name in service.model_names:
        raise InputError(f"lora_name is {name!r}, which is a name of the served model", param="lora_name")
    await service.worker.loras.load(name, _folder(root, body.lora_path), replaces=body.load_inplace)
    _log.info("the LoRA adapter %r was loaded", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post(UNLOAD_LORA, responses=_DONE)
async def unload(body: UnloadBody, root: RootDep, service: ServiceDep) -> Response:
    """Remove a LoRA adapter. Its running requests finish.

    The route exists only with `--lora-dir`, and takes the key of `--admin-key`.
    """
    pass_over_fields(body.unknown, strict=service.config.strict)
    await service.worker.loras.unload(body.lora_name)
    service.metrics.forget_lora(body.lora_name)
    _log.info("the LoRA adapter %r was unloaded", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _folder(root: Path, text: str) -> Path:
    """Return the folder of an adapter. Raise an error if the folder or its files are not below `root`."""
    try:
        top, folder = root.resolve(), (root / text).resolve()
        files = [(folder / name).resolve() for name in (CONFIG, WEIGHTS)]
        is_inside = all(path.is_relative_to(top) for path in (folder, *files))
        exists = is_inside and folder.is_dir()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # a loop of links, a null character, or a name that is too long
        why = getattr(error, "strerror", None) or error
        raise InputError(f"lora_path is {text!r}, which is no path: {why}", param="lora_path") from error
    if not is_inside:
        raise InputError(
            f"lora_path is {text!r}, which is not below the folder of --lora-dir, or has files that are not",
            param="lora_path",
        )
    if not exists:
        raise NotStored(f"No adapter found for {text!r}; lora_path must be a folder below --lora-dir")
    return folder
