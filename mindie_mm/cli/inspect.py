"""mindie-mm inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH
from mindie_mm.errors import StorageError, os_errors_as


@click.command("inspect")
@click.argument("folder", type=PATH)
@click.argument("row", type=int, required=False)
@click.option("--model", type=PATH, help="Checkpoint directory; the rows' own if not given.")
@click.option("--other-model", is_flag=True, help="Take a checkpoint whose tokenising files did not make the rows.")
@click.option("--png", type=PATH, help="Where the row's pictures go.  [default: row-<ROW>.png]")
def command(folder: Path, row: int | None, model: Path | None, *, other_model: bool, png: Path | None) -> None:
    """Show what `tokenize` wrote to FOLDER: the run, or one ROW with its pictures on one page."""
    from mindie_mm.batch import Dataset

    dataset = Dataset(folder)
    if row is None:
        _show_run(dataset.manifest)
        return
    if not 0 <= row < len(dataset):
        raise click.UsageError(f"row {row} of {len(dataset)}")
    dataset.shard(row).verify(folder)
    sample = dataset[row]
    click.echo(f"row {sample.row}, id {sample.id}")
    if sample.ids is None:
        click.echo(f"failed: {sample.error}")
        return
    from mindie_mm.models import family_of  # late: it imports torch, which a run's table needs none of
    from mindie_mm.nn.checkpoint import Checkpoint

    run = dataset.manifest.run
    checkpoint = run.settings.checkpoint() if model is None else Checkpoint.open(model)
    if not other_model:
        run.require_model(checkpoint)
    family = family_of(checkpoint, run.settings.family or None)
    if pictures := _show_prompt(sample, family.tokenizer(checkpoint), family.processor(checkpoint)):
        _save(pictures, png or Path(f"row-{row}.png"))


def _show_prompt(sample: Any, tokenizer: Any, processor: Any) -> list[Any]:
    """Prints the row's text and what its media are; their pictures."""
    from mindie_mm.nn.splice import ITEM, MediaShape

    click.echo(f"{len(sample.ids)} tokens")
    pictures, at = [], 0
    for span, arrays in zip(sample.spans, sample.arrays, strict=True):
        click.echo(repr(tokenizer.decode(sample.ids[at : span.start])))
        held = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items() if name != ITEM)
        click.echo(f"{span.kind} in slots {span.start} to {span.stop - 1}: {held}")
        if span.kind != "audio":
            pictures += processor.pictures(arrays, MediaShape.of(arrays).grid)
        at = span.stop
    click.echo(repr(tokenizer.decode(sample.ids[at:])))
    return pictures


def _save(pictures: list[Any], png: Path) -> None:
    """StorageError."""
    from mindie_mm.batch.sheet import contact_sheet

    with os_errors_as(StorageError, f"{png} cannot be written"):
        contact_sheet(pictures).save(png, "PNG")
    click.echo(f"{len(pictures)} picture{'' if len(pictures) == 1 else 's'} in {png}")


def _show_run(manifest: Any) -> None:
    click.echo(
        f"{manifest.num_rows} rows, {manifest.num_errors} failed, {manifest.num_tokens} tokens, "
        f"{manifest.num_items} media items in {manifest.num_bytes / 1e6:.1f} MB"
    )
    settings = manifest.run.settings
    click.echo(f"model {settings.model or 'embedded'}, inputs {', '.join(settings.inputs)}")
    for shard in manifest.shards:
        info = shard.info
        click.echo(
            f"{shard.table}: rows {info.first_row} to {info.stop_row - 1}, {info.num_errors} failed, "
            f"{info.num_items} items, {info.num_bytes / 1e6:.1f} MB"
        )
