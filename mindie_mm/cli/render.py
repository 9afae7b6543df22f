"""mindie-mm render."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.hub import with_local_model
from mindie_mm.cli.paths import PATH
from mindie_mm.cli.serve import log_settings
from mindie_mm.cli.settings import SettingsCommand, configured, settings
from mindie_mm.errors import InputError
from mindie_mm.processes.standard_streams import stderr_without_waiting
from mindie_mm.settings.config import EngineConfig, MediaCaps, ServiceConfig, WorkerConfig
from mindie_mm.settings.sources import Configuration

_OF_ENGINE = frozenset(field.name for field in fields(EngineConfig)) - {"max_model_len", "cpu_binding"}
_OF_WORKER = frozenset({"lora", "lora_dir"})
_OF_SERVICE = frozenset({"enable_scale_out", "files_path", "response_store_bytes", "web_page", "replicas"})


@click.command("render", cls=SettingsCommand)
@click.argument("path", required=False, type=PATH)
@settings(ServiceConfig, MediaCaps, WorkerConfig, EngineConfig, without=_OF_ENGINE | _OF_WORKER | _OF_SERVICE)
def command(path: Path | None, **flags: Any) -> None:
    """Serve the token ids of prompts, and the places and hashes of their media, for routers and vLLM servers.

    Serves vLLM's /v1/chat/completions/render and /v1/completions/render, and /tokenize, /health and /metrics. Reads no
    weights, and needs no accelerator.

    PATH is the folder of a checkpoint or the name of a repository on the Hugging Face Hub. Without PATH, the embedded
    checkpoint is used.
    """
    given = configured(path, flags | {"enable_scale_out": True, "web_page": False})
    if given.worker.serves_loras:
        raise InputError("render serves no LoRA adapters; leave out lora and lora_dir")
    service = replace(
        given.service,
        like="vllm" if given.service.like == "auto" else given.service.like,
        model_id=given.service.model_id or (None if path is None else os.fspath(path)),
    )
    given = with_local_model(replace(given, service=service).for_service(), weights=False)
    with stderr_without_waiting():
        _render(given)


def _render(configuration: Configuration) -> None:
    log_settings(configuration)
    from mindie_mm.processes.fork_client import ForkClient  # imported late, because other commands do not need asyncio

    worker = configuration.worker
    forks = ForkClient("mindie_mm.worker.preloading", str(worker.model or ""), worker.family or "")
    try:
        from service.server import serve  # imported late, because it is slow to import

        serve(worker, configuration.service, forks, only_plans=True)
    finally:
        forks.abandon()
