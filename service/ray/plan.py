"""The plan that each replica of an application receives: the settings, and the version that built the application."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from mindie_mm.errors import InputError, NoProcess
from mindie_mm.settings.config import ServiceConfig, WorkerConfig
from mindie_mm.settings.sources import PARTS, Configuration, checked_settings, configuration
from mindie_mm.shm.format import layout

_CALLS = 2
"""Version of the calls between ingress and worker (`WorkerReplica.answer`)."""
LOST = "lost"
"""Key in an ASGI message that begins the answer to a request that a worker's processes did not survive."""
_CALLER = "mindie_mm.caller"
"""Key in an ASGI scope for the versions of the ingress that passes the request to a worker."""


class _Versions(msgspec.Struct, frozen=True):
    version: str
    """Version of mindie_mm."""
    wire: str
    """Versions of everything that processes of mindie_mm exchange."""

    def __str__(self) -> str:
        return f"mindie_mm {self.version} with wire format {self.wire}"


class _Plan(_Versions, frozen=True):
    settings: dict[str, Any]


def versions() -> _Versions:
    """Return the versions of this installation."""
    return _Versions(version("mindie_mm"), f"{layout.VERSION}.{_CALLS}")


def calling(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an ASGI scope that contains the versions of this ingress."""
    return {**scope, _CALLER: msgspec.to_builtins(versions())}


def refusal_of(scope: Mapping[str, Any]) -> NoProcess | None:
    """Return the error for a call from an ingress with other calls, as during a rolling update. Otherwise, return None.

    The ingress passes the request on to another worker.
    """
    theirs = msgspec.convert(scope[_CALLER], _Versions) if _CALLER in scope else "an earlier version of mindie_mm"
    ours = versions()
    if isinstance(theirs, _Versions) and theirs.wire == ours.wire:
        return None
    return NoProcess(
        f"the ingress has {theirs}, but the worker on node {socket.gethostname()} has {ours}; try again when the "
        "update of the application is complete, or install the same version of mindie_mm on all nodes"
    )


def require_supported(config: ServiceConfig, worker: WorkerConfig) -> None:
    """Raise InputError if a setting has no effect with Ray Serve, whose own server listens."""
    for name in ("ssl_certfile", "root_path"):
        if getattr(config, name) is not None:
            raise InputError(f"{name} is not supported with Ray, whose proxies receive the requests; set it in a proxy")
    if config.api_key_file is not None:
        raise InputError(
            "api_key_file is not supported with Ray, because each ingress replica would count the quotas for itself; "
            "set api_key"
        )
    if worker.lora_dir is not None:
        raise InputError(
            "lora_dir is not supported with Ray, because one worker of the cluster would load an adapter; give all "
            "adapters at the start, with lora"
        )


def plan_of(settings: Mapping[str, Any]) -> bytes:
    """Return a plan with `settings`, by name.

    A worker has one engine unless `settings` contain `replicas`. MINDIE_MM_REPLICAS has no effect on a node, because
    this variable is the number of workers in the environment of `mindie-mm serve --ray`.
    """
    ours = versions()
    settings = {"replicas": 1, **settings}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    return msgspec.json.encode(_Plan(ours.version, ours.wire, plain))


def given_settings(given: Configuration) -> dict[str, Any]:
    """Return the settings that are not at their default, by name."""
    owners = (given.worker, given.worker.engine, given.worker.media, given.service)
    return {
        name: getattr(owner, name)
        for owner in owners
        for name in owner.__dataclass_fields__
        if name in given.origins and name not in PARTS
    }


def configuration_of(plan: bytes) -> Configuration:
    """Return the settings of a plan, with the service's defaults.

    Settings that the plan does not contain are read from the environment of this node.

    Raises:
        InputError: A setting is invalid or not supported, or the plan is from a version with another wire format.

    """
    theirs, ours = msgspec.json.decode(plan, type=_Versions), versions()
    if theirs.wire != ours.wire:
        raise InputError(
            f"node {socket.gethostname()} has {ours}, but the application was built by {theirs}; install the same "
            "version of mindie_mm on all nodes"
        )
    settings = msgspec.json.decode(plan, type=_Plan).settings
    found = configuration(checked_settings("the application", settings)).for_service()
    require_supported(found.service, found.worker)
    return found
