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
from service.request.chat_format import ChatFormat
from service.request.kept_media import KeptMedia
from service.request.media import MediaPolicy
from service.request.quota import SpoolProbe
from service.request.token_text import TokenTexts
from service.telemetry.metrics import Metrics

PLACEHOLDERS = frozenset({"default", "dummy", "model", "tgi"})
"""Names that clients send when their user names no model.

SGLang's clients send "default", huggingface_hub "dummy", and the examples of text-generation-inference "tgi". The name
of a real model, such as gpt-3.5-turbo, is no placeholder: its sender expects that model.
"""


@dataclass(frozen=True, slots=True)
class Service:
    """One running service."""

    worker: Worker
    config: ServiceConfig
    model_names: tuple[str, ...]
    """Names of the served model. Answers have the first."""
    spool: Path
    """Folder with a directory per request, which contains the request's path file and its media files."""
    media: MediaPolicy
    kept: KeptMedia
    """Media by `uuid`."""
    admission: Admission
    metrics: Metrics
    tokens: TokenTexts
    chat_format: ChatFormat
    """Format of calls and reasoning."""
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

    @property
    def model_name(self) -> str:
        """Name of the served model in answers."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound if `name` is given and asks for another model.

        Any name asks for the served model with `any_model_name`, and a placeholder does in any case.
        """
        if name is not None and name not in PLACEHOLDERS and not self.config.any_model_name:
            self.require_listed(name)

    def require_listed(self, name: str) -> None:
        """Raise ModelNotFound if `name` is not one of the served model's names."""
        if name not in self.model_names:
            served = " or ".join(map(repr, self.model_names))
            raise ModelNotFound(f"the model {name!r} does not exist; this service serves {served}", param="model")


async def _service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(_service)]
