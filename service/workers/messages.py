"""Messages between the workers of a port and the process that started them, as msgpack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mindie_mm.settings.config import ServiceConfig, WorkerConfig
from service.render.plans import Kept, Report


class Setup(msgspec.Struct, frozen=True):
    """First message to a worker: its settings. They may contain API keys, which a command line would show."""

    name: str
    """Name of the worker in metrics."""
    worker: WorkerConfig
    service: ServiceConfig

    def encode(self) -> bytes:
        """Return the message."""
        return msgspec.msgpack.encode(self, enc_hook=_path_text)

    @classmethod
    def decode(cls, message: bytes) -> Setup:
        """Read the message."""
        return msgspec.msgpack.decode(message, type=cls, dec_hook=_path_of)


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """First message from a worker: it accepts connections."""

    line: str
    """Line to print when all workers are ready."""


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """Message from a worker: look up the plans of media."""

    number: int
    """Number of the question. The answer has the same number."""
    keys: list[bytes]


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """Answer to `Find`."""

    number: int
    values: list[bytes | None]


class Keep(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """Message from a worker: keep the plans of media."""

    entries: list[Kept]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Message from a worker: collect the reports of the other workers. The same message asks a worker for its own."""

    number: int


class Reported(msgspec.Struct, frozen=True, array_like=True, tag="reported"):
    """Message from a worker: its own report."""

    number: int
    report: Report


class Reports(msgspec.Struct, frozen=True, array_like=True, tag="reports"):
    """Answer to a worker's `Ask`."""

    number: int
    reports: Mapping[str, Report]


FromWorker = Find | Keep | Ask | Reported
ToWorker = Found | Reports | Ask


def _path_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _path_of(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(kind)
