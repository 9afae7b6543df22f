"""The LoRA adapter of a command that uses one adapter for everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.nn.lora.adapter_config import WEIGHTS, digest_of, read_config
from mindie_mm.settings.config import WorkerConfig


def with_one_lora(config: WorkerConfig, folder: Path | None) -> tuple[WorkerConfig, str | None]:
    """Return settings of a worker that loads only one adapter or none, and the adapter's name.

    The name is the digest of the files, so that records of sampling settings identify the adapter.

    Args:
        config: Settings, whose own adapters are left out, because they are those of a service.
        folder: Folder of the adapter, or None.

    Raises:
        InputError: The folder is not that of an adapter, or the adapter is not served.

    """
    if folder is None:
        return replace(config, lora=(), lora_dir=None), None
    adapter, settings = read_config(folder)
    with os_errors_as(UnsupportedCheckpoint, f"{folder / WEIGHTS} cannot be read"):
        name = digest_of(settings, (folder / WEIGHTS).read_bytes())
    engine = replace(config.engine, max_loras=1, max_lora_rank=adapter.most_rank)
    return replace(config, lora=(f"{name}={folder}",), lora_dir=None, engine=engine), name
