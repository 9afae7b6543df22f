"""mindie-mm serve."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.settings import configured, settings
from mindie_mm.config import EngineConfig, MediaCaps, ServiceConfig, WorkerConfig


@click.command("serve")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@settings(ServiceConfig, MediaCaps, WorkerConfig, EngineConfig)
def command(path: Path | None, **flags: Any) -> None:
    """Serve the checkpoint directory PATH, or the embedded one, over HTTP.

    Each option can also be set by the environment, as MINDIE_MM_<OPTION>.
    """
    from service.server import serve  # late: a web framework

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve(*configured(path, flags))
