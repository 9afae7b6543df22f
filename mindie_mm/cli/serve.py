"""mindie-mm serve."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import click

from mindie_mm import logs
from mindie_mm.cli.hub import with_local_model, with_model_id
from mindie_mm.cli.paths import MODEL
from mindie_mm.cli.settings import SettingsCommand, configured, settings
from mindie_mm.errors import InputError
from mindie_mm.processes.standard_streams import stderr_without_waiting
from mindie_mm.settings.config import EngineConfig, MediaCaps, ServiceConfig, WorkerConfig
from mindie_mm.settings.sources import DEFAULT, Configuration, misspelt_variables, without_effect

_log = logging.getLogger("mindie_mm.settings")
_OF_RENDER = frozenset({"workers"})
"""Settings that only `mindie-mm render` has."""


@click.command("serve", cls=SettingsCommand)
@click.argument("path", required=False, type=MODEL)
@click.option("--ray", "ray_address", is_flag=False, flag_value="local", metavar="[ADDRESS]",
              help="Serve with Ray Serve, on the Ray cluster at ADDRESS or on a local one. Requires the extra "
                   "`serve-ray`.")  # fmt: skip
@settings(ServiceConfig, MediaCaps, WorkerConfig, EngineConfig, without=_OF_RENDER)
def command(path: str | None, ray_address: str | None, **flags: Any) -> None:
    """Serve the checkpoint in folder PATH over HTTP. Without PATH, serve the embedded checkpoint.

    PATH may also be the name of a repository on the Hugging Face Hub, such as Qwen/Qwen2-VL-2B-Instruct.

    When the service is ready, it prints one line with its URL, model, device, data type and free memory. Ctrl-C stops
    the service.

    You can also set each option in the environment, as MINDIE_MM_<OPTION>, or in the file of --config. When the service
    starts, it logs the settings that are not at their default, and where they come from.
    """
    configuration = with_local_model(with_model_id(configured(path, flags).for_service(), path))
    warnings = without_effect(configuration, _OF_RENDER, "serve")
    with stderr_without_waiting():
        _serve(configuration, ray_address, warnings)


def log_settings(configuration: Configuration, warnings: Iterable[str] = ()) -> None:
    """Configure logs. Log the settings that are not at their default, `warnings`, and misspelt variables."""
    logs.configure(logs.LogSettings(configuration.service.log_format, configuration.service.log_level), "api")
    settings = configuration.settings()
    for one in settings:
        fields = {"setting": one.name, "value": one.value, "origin": one.origin}
        _log.debug("%s = %s (%s)", one.name, one.value, one.origin, extra={"fields": fields})
    if given := [one for one in settings if one.origin != DEFAULT]:
        text = ", ".join(f"{one.name} = {one.value} ({one.origin})" for one in given)
        _log.info("%s", text, extra={"fields": {"settings": {one.name: one.value for one in given}}})
    for warning in (*warnings, *misspelt_variables()):
        _log.warning("%s", warning)


def _serve(configuration: Configuration, ray_address: str | None, warnings: Sequence[str]) -> None:
    log_settings(configuration, warnings)
    from mindie_mm.worker.preflight import check_before_loading  # imported late, like the next modules

    if ray_address in (None, "local"):  # other clusters have other folders and devices than this machine
        check_before_loading(configuration.worker)
    if ray_address is not None:
        from service.ray.server import serve_on_ray  # imported late, because it is slow to import

        replicas = configuration.worker.replicas
        if replicas == "auto":
            raise InputError("replicas=auto is not supported with --ray; give a number of workers")
        worker = replace(configuration.worker, replicas=1)
        origins = {name: origin for name, origin in configuration.origins.items() if name != "replicas"}
        serve_on_ray(Configuration(worker, configuration.service, origins), ray_address, replicas)
        return
    from mindie_mm.processes.fork_client import ForkClient  # imported late, because other commands do not need asyncio

    worker = configuration.worker
    # The fork server imports its modules at the same time as this process.
    forks = ForkClient("mindie_mm.worker.preloading", str(worker.model or ""), worker.family or "")
    try:
        from service.server import serve  # imported late, because it is slow to import

        serve(worker, configuration.service, forks)
    finally:
        forks.abandon()
