"""mindie-mm doctor."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.console import print_table
from mindie_mm.cli.paths import PATH
from mindie_mm.cli.settings import SettingsCommand, configured, settings
from mindie_mm.processes.interrupts import importing
from mindie_mm.settings.config import EngineConfig, WorkerConfig


@click.command("doctor", cls=SettingsCommand, short_help="Check whether this machine can serve a checkpoint.")
@click.argument("path", required=False, type=PATH)
@click.option("--operators", is_flag=True, help="Compare the device's fused operators with plain PyTorch.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--root", type=PATH, default=Path("/"), hidden=True)  # for tests that imitate the files of a machine
@settings(WorkerConfig, EngineConfig)
def command(path: Path | None, *, operators: bool, as_json: bool, root: Path, **flags: Any) -> None:
    """Check whether this machine can serve the checkpoint PATH, and say how to fix each problem.

    PATH is a checkpoint directory. Without PATH, the embedded checkpoint is checked. Give the same options as to
    `mindie-mm serve`.

    Exit status: 1 if a problem would prevent the service from starting, otherwise 0.
    """
    with importing():
        from mindie_mm.doctor import examine

    findings = list(examine(configured(path, flags), root, operators=operators))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        print_table([(finding.status, finding.subject, finding.found, finding.advice) for finding in findings])
    sys.exit(any(finding.status == "error" for finding in findings))
