"""State of the running service, shared by all routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from mindie_mm.errors import ModelNotFound, ServiceStopping
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.worker.worker import Worker
from service.request.admission import Admission
from service.request.media import MediaPolicy
from service.request.quota import SpoolProbe
from service.request.token_text import TokenTexts
from service.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Service:
    """One running service."""

    worker: Worker
    config: ServiceConfig
    model_name: str
    spool: Path
    """Folder with a directory per request, which contains the request's path file and its media files."""
    media: MediaPolicy
    admission: Admission
    metrics: Metrics
    tokens: TokenTexts
    spool_probe: SpoolProbe
    """Check whether files can be written to the spool."""
    tokenizer_info: Mapping[str, Any]
    """`tokenizer_info` of the checkpoint."""
    fingerprint: str
    """`fingerprint` of the worker."""
    created: int
    """Unix time of the service's start."""

    async def check_healthy(self) -> None:
        """Raise ServiceStopping, ProcessDied or SpoolFull if the service cannot answer requests."""
        if self.admission.stopping:
            raise ServiceStopping("the service is stopping")
        self.worker.check()
        await self.spool_probe.check()

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound if `name` is given and is not the served model's name."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(
                f"the model {name!r} does not exist; this service serves {self.model_name!r}", param="model"
            )


async def _service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(_service)]
