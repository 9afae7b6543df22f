"""mindie-mm doctor."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindie_mm.cli.console import print_table
from mindie_mm.cli.hub import hub_weight_bytes, with_local_model
from mindie_mm.cli.paths import PATH
from mindie_mm.cli.settings import SettingsCommand, configured, settings
from mindie_mm.errors import InputError
from mindie_mm.processes.interrupts import importing
from mindie_mm.settings.config import EngineConfig, ServiceConfig, WorkerConfig

if TYPE_CHECKING:
    from mindie_mm.device.finding import Finding


class _Size(click.ParamType[tuple[int, int]]):
    """The type of a width and height, such as 1280x720."""

    name = "WIDTHxHEIGHT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        if not (match := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", value)):
            self.fail(f"{value!r} is not a width and height in pixels, such as 1280x720", param, ctx)
        return int(match[1]), int(match[2])


@click.command("doctor", cls=SettingsCommand)
@click.argument("path", required=False, type=PATH)
@click.option(
    "--image-size",
    type=_Size(),
    default="1024x1024",
    show_default=True,
    help="Width and height of the image whose cost is shown, in pixels.",
)
@click.option("--operators", is_flag=True, help="Compare the device's fused operators with plain PyTorch.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--root", type=PATH, default=Path("/"), hidden=True)  # for tests that imitate the files of a machine
@settings(WorkerConfig, EngineConfig)
def command(
    path: Path | None, *, image_size: tuple[int, int], operators: bool, as_json: bool, root: Path, **flags: Any
) -> None:
    """Check whether this machine can serve the checkpoint PATH, and say how to fix each problem.

    PATH is a checkpoint directory, or the name of a repository on the Hugging Face Hub. All of its files except the
    weights are downloaded. Without PATH, the embedded checkpoint is checked. Give the same options as to `mindie-mm
    serve`.

    If PATH has no weights, only the checkpoint is judged, before its download: the family, the quantization, the
    settings, the context length, and the cost of an image. PATH needs only a config.json, or is a config.json itself.

    Exit status: 1 if a problem would prevent the service from starting, otherwise 0.
    """
    findings = list(_findings(path, image_size, operators, root, flags))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        print_table([(finding.status, finding.subject, finding.found, finding.advice) for finding in findings])
    sys.exit(any(finding.status == "error" for finding in findings))


def _findings(
    path: Path | None, image_size: tuple[int, int], operators: bool, root: Path, flags: dict[str, Any]
) -> Iterator[Finding]:
    """Yield the findings about the checkpoint. If it has weights, also yield those about the machine."""
    given = configured(path, flags)
    configuration = with_local_model(given, weights=False)
    worker = configuration.worker
    path = path and worker.model
    has_weights = path is None or _has_weights(path)
    if path is not None and has_weights is not None:
        num_bytes = None if has_weights else hub_weight_bytes(given)
        with importing():
            if not has_weights:
                from mindie_mm.doctor.stand_ins import install

                install()  # because the import of torch takes a second or two
            from mindie_mm.device.finding import Finding
            from mindie_mm.doctor.judgement import judge

            _silence_libraries()
        yield from judge(path, worker.family, image_size, worker.engine, num_bytes)
        if not has_weights:
            advice = "to check this machine, leave out PATH"
            yield Finding("machine", "ok", "not checked, because PATH has no weights", advice)
            return
    with importing():
        from mindie_mm.doctor.machine import examine

    yield from examine(configuration, root, operators=operators)
    yield from _files_of_the_service(configuration.service)


def _files_of_the_service(config: ServiceConfig) -> Iterator[Finding]:
    """Check the certificate and the file of API keys, if the settings name them."""
    from mindie_mm.device.finding import Finding
    from service.http.certificate import Certificate
    from service.http.clients import Clients

    read: tuple[tuple[str, Path | None, Callable[[ServiceConfig], object]], ...] = (
        ("certificate", config.ssl_certfile, Certificate.of),
        ("API keys", config.api_key_file, Clients),
    )
    for subject, file, use in read:
        if file is None:
            continue
        try:
            use(config)
        except InputError as error:
            yield Finding(subject, "error", f"{file} cannot be used", str(error))
        else:
            yield Finding(subject, "ok", f"{file} can be used")


def _silence_libraries() -> None:
    """Suppress messages of transformers about settings, because the findings judge these settings."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def _has_weights(path: Path) -> bool | None:
    """Return whether a checkpoint directory has weights. Return None if there is no such directory."""
    from mindie_mm.nn.checkpoint.directory import Checkpoint  # late, because it is slow to import

    folder = path.parent if path.name == "config.json" else path
    return bool(Checkpoint(folder, {}).weight_files()) if (folder / "config.json").is_file() else None
