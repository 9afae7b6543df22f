"""mindie-mm verify."""

from __future__ import annotations

from pathlib import Path

import click

from mindie_mm.cli.paths import RUN_FOLDER
from mindie_mm.errors import StorageError, os_errors_as
from mindie_mm.inputs.checks import counted
from mindie_mm.processes.interrupts import importing


@click.command("verify")
@click.argument("folder", type=RUN_FOLDER)
def command(folder: Path | str) -> None:
    """Check the files of the run that `mindie-mm tokenize` wrote to FOLDER. No model is loaded.

    FOLDER may be a URL, such as s3://bucket/run/.

    The digests of all tables and files of arrays, the position and digest of each array, and the numbers of rows,
    errors, tokens and media items must be the same as in manifest.json. run.json must have the settings in
    manifest.json, and errors.jsonl the failed rows. The command prints the damaged files and rows, and which files to
    remove for a repair. It does not change any file.

    Exit status: 0 if the run is intact, 1 if it is damaged.
    """
    with importing():
        from mindie_mm.batch.input.remote import file_at
        from mindie_mm.batch.output.manifest import Manifest
        from mindie_mm.batch.output.verify import Damage, damages
        from mindie_mm.batch.progress import shown

    at = file_at(folder)
    manifest = Manifest.read(at)
    found: list[Damage] = []
    try:
        with shown("auto") as show:
            found.extend(damages(at, manifest, show))
    finally:  # after the progress bar, and also after an interrupt
        for damage in found:
            click.echo(damage)
    if not found:
        click.echo(f"{counted(manifest.num_rows, 'row')} and {manifest.num_bytes / 1e6:.1f} MB of arrays are intact")
        return
    with os_errors_as(StorageError, f"{folder} cannot be listed"):
        removed = [path for path in dict.fromkeys(damage.remove for damage in found) if path.exists()]
    first = "remove these files, and " if removed else ""
    click.echo(f"To repair the run, {first}run the command of `mindie-mm tokenize` again.")
    click.echo("It writes only the shards that have no table.")
    for path in removed:
        click.echo(f"    {path}")
    raise SystemExit(1)
