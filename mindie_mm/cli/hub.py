"""Models that a command names as on the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import click

from mindie_mm.nn.checkpoint.hub import downloaded, repository_name, weight_bytes
from mindie_mm.settings.sources import Configuration


def with_local_model(configuration: Configuration, *, weights: bool = True) -> Configuration:
    """Return the settings with the folder of the model, which is downloaded if it is named as on the Hugging Face Hub.

    A terminal is asked first. Without a terminal, weights are only downloaded if the setting `download` is on.

    Args:
        configuration: Settings, whose `model` may be a name on the Hub.
        weights: Whether the command needs the weights. Other files are small, and are downloaded without a question.

    Raises:
        UnsupportedCheckpoint: A download is necessary, and is not allowed.

    """
    worker = configuration.worker
    if worker.model is None or (name := repository_name(worker.model)) is None:
        return configuration

    if worker.download or not weights:
        agrees: Callable[[str], bool] | None = _announced
    else:
        agrees = _confirmed if sys.stdin.isatty() else None
    folder = downloaded(name, worker.revision, agrees, weights=weights)
    return replace(configuration, worker=replace(worker, model=folder))


def with_model_id(configuration: Configuration, path: str | None) -> Configuration:
    """Return the settings with `model_id`, which is by default the model as it was given.

    Call this before `with_local_model`, which replaces names on the Hugging Face Hub. `path` is the argument of the
    command. Other sources of settings give an absolute path, or the name of a repository.
    """
    service, model = configuration.service, configuration.worker.model
    if service.model_id is not None or model is None:
        return configuration
    return replace(configuration, service=replace(service, model_id=path or repository_name(model) or str(model)))


def hub_weight_bytes(configuration: Configuration) -> int | None:
    """Return the size of the weights of a model that is named as on the Hugging Face Hub, or None if it is unknown."""
    worker = configuration.worker
    name = worker.model and repository_name(worker.model)
    return weight_bytes(name, worker.revision) if name else None


def _announced(download: str) -> bool:
    click.echo(f"Downloading {download}", err=True)
    return True


def _confirmed(download: str) -> bool:
    return click.confirm(f"Download {download}?", err=True)
