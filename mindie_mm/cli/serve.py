"""mindie-mm serve."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH
from mindie_mm.cli.settings import configured, settings
from mindie_mm.config import EngineConfig, MediaCaps, ServiceConfig, WorkerConfig
from mindie_mm.sources import misspelt_variables

_log = logging.getLogger("mindie_mm.settings")


@click.command("serve")
@click.argument("path", required=False, type=PATH)
@settings(ServiceConfig, MediaCaps, WorkerConfig, EngineConfig)
def command(path: Path | None, **flags: Any) -> None:
    """Serve the checkpoint directory PATH, or the embedded one, over HTTP.

    Each option can also be set by the environment, as MINDIE_MM_<OPTION>, or in the file of --config. The log begins
    with all of them, and where each came from.
    """
    from mindie_mm import logs  # late, as the server: `mindie-mm --help` imports every command

    found = configured(path, flags)
    logs.configure(logs.LogSettings(found.service.log_format, found.service.log_level), "api")
    for one in found.settings():
        fields = {"setting": one.name, "value": one.value, "origin": one.origin}
        _log.info("%s = %s (%s)", one.name, one.value, one.origin, extra={"fields": fields})
    for said in misspelt_variables():
        _log.warning("%s", said)
    from service.server import serve  # late: a web framework

    serve(found.worker, found.service)
