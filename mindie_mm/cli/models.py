"""mindie-mm models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from mindie_mm.cli.console import print_table
from mindie_mm.errors import InputError
from mindie_mm.processes.interrupts import importing


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, as_json: bool) -> None:
    """List the supported model families, their media, and the implementation that tests compare each family with."""
    with importing():
        from mindie_mm.models import family_named, family_names

        families = [_described(name, family_named) for name in family_names()]
    if as_json:
        click.echo(json.dumps(families))
        return
    rows = [
        (family["name"], ", ".join(family["model_types"]), ", ".join(family["kinds"]), family["reference"])
        for family in families
    ]
    print_table(rows, headers=("family", "model_type", "media", "tested against"))


def _described(name: str, find: Callable[[str], Any]) -> dict[str, Any]:
    try:
        family = find(name)
    except InputError as error:  # a family from another package cannot be imported
        return {"name": name, "model_types": [], "kinds": [], "reference": str(error), "package": None}
    return {
        "name": name,
        "model_types": list(family.model_types),
        "kinds": list(family.kinds),
        "reference": family.reference,
        "package": family.__module__.partition(".")[0],
    }
