"""mindie-mm inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH, RUN_FOLDER
from mindie_mm.errors import StorageError, UnsupportedCheckpoint, os_errors_as
from mindie_mm.inputs.checks import counted
from mindie_mm.processes.interrupts import importing


@click.command("inspect")
@click.argument("folder", type=RUN_FOLDER)
@click.argument("row", type=int, required=False)
@click.option("--model", type=PATH, help="Checkpoint directory.  [default: the checkpoint that tokenized the rows]")
@click.option("--other-model", is_flag=True,
              help="Accept a checkpoint even if its tokenizer files differ from the files that were used to tokenize "
              "the rows.")  # fmt: skip
@click.option("--png", type=PATH, help="Write the row's images to this PNG file, on one page.")
def command(folder: Path | str, row: int | None, model: Path | None, *, other_model: bool, png: Path | None) -> None:
    """Show the run that `mindie-mm tokenize` wrote to FOLDER, or one ROW of the run.

    FOLDER may be a URL, such as s3://bucket/run/. Without ROW, the sizes of the run and of its shards are printed. With
    ROW, the row's text and media are printed. The command does not write files unless you give --png.
    """
    with importing():
        from mindie_mm.batch import Dataset

    if row is None and png is not None:
        raise click.UsageError("--png writes the images of one row; give the number of the row as the argument ROW")
    dataset = Dataset(folder)
    if row is None:
        _show_run(dataset.manifest)
        return
    if not 0 <= row < len(dataset):
        raise click.UsageError(f"there is no row {row}: {folder} has {counted(len(dataset), 'row')}, numbered from 0")
    dataset.verify(row)
    sample = dataset[row]
    click.echo(f"row {sample.row}, id {sample.id}")
    if sample.ids is None:
        click.echo(f"failed: {sample.error}")
        return
    tokenizer, processor = _opened(dataset.manifest.run, model, other_model=other_model, required=png is not None)
    images = _show_prompt(sample, tokenizer, processor)
    if png is not None:
        _save(images, png)
    elif images:
        click.echo(f"{counted(len(images), 'image')}; to write a PNG file of them, use --png FILE")


def _opened(run: Any, model: Path | None, *, other_model: bool, required: bool) -> tuple[Any, Any]:
    """Return the tokenizer and the processor of the checkpoint.

    If the checkpoint that tokenized the rows is not on this machine, print that and return None for both, unless the
    caller named a checkpoint or the checkpoint is `required`.
    """
    with importing():  # imports torch, which is not needed without ROW
        from mindie_mm.models import family_of
        from mindie_mm.nn.checkpoint.directory import Checkpoint

        try:
            checkpoint = run.settings.checkpoint() if model is None else Checkpoint.open(model)
        except UnsupportedCheckpoint as error:
            if required or model is not None:
                raise
            click.echo(f"token ids are shown instead of text, because {error}. Give the path with --model")
            return None, None
        if not other_model:
            run.require_model(checkpoint)
        family = family_of(checkpoint, run.settings.family or None)
    return family.tokenizer(checkpoint), family.processor(checkpoint)


def _show_prompt(sample: Any, tokenizer: Any, processor: Any) -> list[Any]:
    """Print the row's text and describe its media. Return the images. Without a tokenizer, print token ids."""
    from mindie_mm.shm.format.item import ITEM, MediaShape

    def shown(ids: Any) -> str:
        return repr(ids.tolist() if tokenizer is None else tokenizer.decode(ids))

    click.echo(counted(len(sample.ids), "token"))
    images, at = [], 0
    for span, arrays in zip(sample.spans, sample.arrays, strict=True):
        click.echo(shown(sample.ids[at : span.start]))
        held = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items() if name != ITEM)
        click.echo(f"{span.kind} at tokens {span.start} to {span.stop - 1}: {held or 'planned, without arrays'}")
        if processor is not None and span.kind != "audio" and arrays:  # a run of --plan has no arrays
            images += processor.images(arrays, MediaShape.of(arrays).grid)
        at = span.stop
    click.echo(shown(sample.ids[at:]))
    return images


def _save(images: list[Any], png: Path) -> None:
    """Write `images` to one page. Raise StorageError if the file cannot be written."""
    if not images:
        click.echo(f"the row has no images; {png} was not written")
        return
    from mindie_mm.cli.sheet import contact_sheet

    with os_errors_as(StorageError, f"{png} cannot be written"):
        contact_sheet(images).save(png, "PNG")
    click.echo(f"wrote {counted(len(images), 'image')} to {png}")


def _show_run(manifest: Any) -> None:
    click.echo(
        f"{counted(manifest.num_rows, 'row')}, {manifest.num_errors} failed, {counted(manifest.num_tokens, 'token')}, "
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
