"""mindie-mm render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import click

from mindie_mm.cli.hub import with_local_model, with_model_id
from mindie_mm.cli.paths import MODEL
from mindie_mm.cli.serve import log_settings
from mindie_mm.cli.settings import SettingsCommand, configured, settings
from mindie_mm.errors import InputError
from mindie_mm.processes.standard_streams import stderr_without_waiting
from mindie_mm.settings.config import EngineConfig, MediaCaps, ServiceConfig, WorkerConfig
from mindie_mm.settings.sources import Configuration, without_effect

_OF_ENGINE = frozenset(field.name for field in fields(EngineConfig)) - {"max_model_len", "cpu_binding", "dtype"}
_OF_LORAS = frozenset({"lora", "lora_dir", "max_loras", "max_lora_rank"})
_OF_ANSWERS = frozenset(
    {
        *("enable_scale_out", "files_path", "max_file_bytes", "max_files_per_key", "max_file_bytes_per_key"),
        *("max_batch_requests", "max_concurrent_batch_requests", "response_store_bytes", "response_store_age_s"),
        *("web_page", "replicas", "replica_surplus_tokens", "pooling", "admin_key", "accept_handles", "log_prompts"),
        *("max_held_logprobs", "enable_prompt_embeds"),
    }
)
_WITHOUT_EFFECT = _OF_ENGINE | _OF_LORAS | _OF_ANSWERS


@click.command("render", cls=SettingsCommand)
@click.argument("path", required=False, type=MODEL)
@settings(ServiceConfig, MediaCaps, WorkerConfig, EngineConfig, without=_WITHOUT_EFFECT)
def command(path: str | None, **flags: Any) -> None:
    """Serve the token ids of prompts, and the places, hashes and tensors of their media, for routers and servers.

    Serves vLLM's /v1/chat/completions/render and /v1/completions/render, and /tokenize, /health and /metrics. Reads no
    weights, and needs no accelerator.

    PATH is the folder of a checkpoint or the name of a repository on the Hugging Face Hub. Without PATH, the embedded
    checkpoint is used.
    """
    given = configured(path, flags)
    if given.worker.serves_loras:
        raise InputError("render serves no LoRA adapters; leave out lora and lora_dir")
    warnings = without_effect(given, _WITHOUT_EFFECT, "render")
    service = replace(
        given.service,
        enable_scale_out=True,
        web_page=False,
        like="vllm" if given.service.like == "auto" else given.service.like,
        files_path=None,  # batches need an engine
    )
    given = replace(given, service=service).for_service()
    given = with_local_model(with_model_id(given, path), weights=False)
    with stderr_without_waiting():
        _render(given, warnings)


def _render(configuration: Configuration, warnings: Sequence[str]) -> None:
    log_settings(configuration, warnings)
    worker = configuration.worker
    if configuration.service.workers > 1:
        from service.workers.workers import serve_workers  # imported late, because it is slow to import

        serve_workers(worker, configuration.service)
        return
    from mindie_mm.processes.fork_client import ForkClient  # imported late, because other commands do not need asyncio

    forks = ForkClient("mindie_mm.worker.preloading", str(worker.model or ""), worker.family or "")
    try:
        from service.server import serve  # imported late, because it is slow to import

        serve(worker, configuration.service, forks, only_plans=True)
    finally:
        forks.abandon()
