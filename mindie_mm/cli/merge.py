"""mindie-mm merge."""

from __future__ import annotations

from pathlib import Path

import click

from mindie_mm.cli.paths import RUN_FOLDER
from mindie_mm.cli.resuming import ROWS_FAILED, resuming
from mindie_mm.inputs.checks import counted
from mindie_mm.processes.interrupts import importing


@click.command("merge")
@click.argument("parts", nargs=-1, required=True, type=RUN_FOLDER, metavar="PART...")
@click.option(
    "--output",
    type=RUN_FOLDER,
    required=True,
    help="Folder for the whole run, which is created if it does not exist, or a URL in an object store.",
)
@resuming()
def command(parts: tuple[Path | str, ...], *, output: Path | str) -> None:
    """Combine each folder PART of `mindie-mm tokenize --part` into one run, as if --part had not been used.

    PART may be a URL, such as s3://bucket/part-1/. The files have the same bytes as those of one call. If the parts
    were written on machines with other paths, paths in run.json and manifest.json may differ. Files on the same file
    system are linked instead of copied.

    Exit status: 0 if all rows succeeded, 1 if some rows failed, 130 if interrupted, 3 if the merge is not finished for
    another reason. Run the same command again to continue.
    """
    with importing():
        from mindie_mm.batch.merge import merge

    manifest, differing = merge(parts, output)
    if differing:
        click.echo(f"run.json and manifest.json have the paths of {parts[0]}: {'; '.join(differing)}")
    rows, tokens = counted(manifest.num_rows, "row"), counted(manifest.num_tokens, "token")
    click.echo(f"{rows}, {manifest.num_errors} failed, {tokens} in {output}")
    if manifest.num_errors:
        raise SystemExit(ROWS_FAILED)
