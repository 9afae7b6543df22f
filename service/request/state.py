"""State of the running service, shared by all routes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from mindie_mm.errors import ModelNotFound, NotStored, ServiceStopping
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.worker.worker import Worker
from service.batches.batches import Batches
from service.files.store import FileStore
from service.http.clients import Clients
from service.render.plans import Shared
from service.request.admission import Admission
from service.request.chat_dialect import ChatDialect
from service.request.kept_media import KeptMedia
from service.request.media import MediaPolicy
from service.request.quota import SpoolProbe
from service.request.response_store import ResponseStore
from service.request.spool_folders import PlanFolder
from service.request.token_text import TokenTexts
from service.telemetry.metrics import Metrics

PLACEHOLDERS = frozenset({"default", "dummy", "model", "tgi"})
"""Model names that clients send if the user has not chosen a model.

SGLang's clients send "default", huggingface_hub sends "dummy", and the examples of text-generation-inference send
"tgi". The name of a real model, such as gpt-3.5-turbo, is not a placeholder, because its sender expects that model.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A worker, and the format of its answers to chats."""

    worker: Worker
    config: ServiceConfig
    chat_dialect: ChatDialect
    """Format of tool calls and reasoning."""


@dataclass(frozen=True, slots=True)
class Service(Served):
    """One running service."""

    model_names: tuple[str, ...]
    """Names of the served model. Answers contain the first name."""
    spool: Path
    """Folder that contains one folder per request, with the request's path file and media files."""
    plan_folder: PlanFolder
    """Folder for the media of requests that are planned without preprocessing."""
    media: MediaPolicy
    kept: KeptMedia
    """Media by `uuid`."""
    responses: ResponseStore
    """Responses that later requests may refer to."""
    file_store: FileStore | None
    """Files that clients have uploaded, if the setting `files_path` is set."""
    clients: Clients
    admission: Admission
    metrics: Metrics
    tokens: TokenTexts
    spool_probe: SpoolProbe
    """Checks whether files can be written to the spool."""
    tokenizer_info: Mapping[str, Any]
    """Result of `tokenizer_info` for the checkpoint."""
    fingerprint: str
    """Result of `fingerprint` for the worker."""
    created: int
    """Unix time at which the service started."""
    replica: str
    """Name of this worker among several, or "" if it is the only one."""
    model_id: str
    """Name of the model in the hashes of media."""
    shared: Shared
    """Plans of media that were planned before, which the workers of a port share."""
    batch_runner: Batches | None = None
    """Batches of clients, if the setting `files_path` is set."""

    async def check_healthy(self) -> None:
        """Raise ServiceStopping, ProcessDied or SpoolFull if the service cannot answer requests."""
        if self.admission.stopping:
            raise ServiceStopping("the service is stopping")
        self.worker.check()
        await self.spool_probe.check()

    async def reload(self) -> None:
        """Read the file of API keys again, and replace the engines one by one (`EngineReplicas.reload`).

        Raises:
            InputError: The file is invalid. The keys and engines are not replaced.
            ProcessDied: Not all engines were replaced.

        """
        self.clients.reload()
        await self.worker.engine.reload(self.config.grace_s)
        _log.info(
            "the reload is complete; the number of engines with new processes is %d", len(self.worker.engine.engines)
        )

    @property
    def files(self) -> FileStore:
        """Files that clients have uploaded. Raise NotStored if the service stores no files."""
        if self.file_store is None:
            raise NotStored("this service stores no files; start it with --files-path FOLDER")
        return self.file_store

    @property
    def batches(self) -> Batches:
        """Batches of clients. Raise NotStored if the service stores no files."""
        if self.batch_runner is None:
            raise NotStored("this service runs no batches; start it with --files-path FOLDER")
        return self.batch_runner

    @property
    def model_name(self) -> str:
        """Name of the served model in answers."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound if `name` is the name of another model, and not of a LoRA adapter either.

        None and placeholder names are always accepted. If the setting `any_model_name` is on, so is every other name.
        """
        if name is not None and name not in PLACEHOLDERS and not self.config.any_model_name:
            self.require_listed(name)

    def fingerprint_of(self, lora: str | None) -> str:
        """Return the `system_fingerprint` of answers with a LoRA adapter, or None."""
        return self.fingerprint if lora is None else f"{self.fingerprint}_{self.worker.loras.get(lora).key[:10]}"

    def lora_of(self, name: str | None) -> str | None:
        """Return `name` if it is the name of a LoRA adapter, or None."""
        return name if name in self.worker.loras else None

    def require_listed(self, name: str) -> None:
        """Raise ModelNotFound if `name` is neither one of the served model's names nor that of a LoRA adapter."""
        if name not in self.model_names and name not in self.worker.loras:
            served = " or ".join(map(repr, (*self.model_names, *(one.name for one in self.worker.loras))))
            raise ModelNotFound(f"the model {name!r} does not exist; this service serves {served}", param="model")


async def _service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(_service)]
