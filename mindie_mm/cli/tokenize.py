"""mindie-mm tokenize."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH
from mindie_mm.cli.resuming import ROWS_FAILED, resuming
from mindie_mm.cli.settings import configured, settings
from mindie_mm.config import MediaCaps, MiB


@click.command("tokenize")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--output", type=PATH, required=True, help="Folder of the run; made if absent.")
@click.option("--model", type=PATH, help="Checkpoint directory; the embedded one if not given.")
@click.option("--family", default="", help="Family that serves it; the one that its config.json names if not given.")
@click.option("--workers", type=click.IntRange(1), help="Processes, or Ray's actors.  [default: one for each CPU]")
@click.option("--shard-bytes", type=click.IntRange(1), default=256 * MiB, show_default=True,
              help="A shard ends with the row that brings its blocks to so many bytes.")  # fmt: skip
@click.option("--shard-rows", type=click.IntRange(1), default=128, show_default=True,
              help="And with that many rows: what a process does at a time.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Only the first rows.")
@click.option("--select-columns", default="",
              help="Columns of tables, and keys of JSON objects, to read, with commas.  [default: all]")  # fmt: skip
@click.option("--template", default="", help="Prompt round a folder's or a tar's media, {media} where they stand.")
@click.option("--chat-template/--no-chat-template", "chat", default=True, show_default=True,
              help="Rows of items are one user turn through the checkpoint's chat template.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(0), default=0,
              help="Most tokens of a row; a longer one is an error.  [default: any number]")  # fmt: skip
@click.option("--truncate", is_flag=True,
              help="Rows longer than --max-tokens lose their oldest text and whole media items instead.")  # fmt: skip
@click.option("--on-error", default="skip", show_default=True, metavar="skip|stop|fail-after=N",
              help="Write the reason beside the row and go on, or stop at the first, or the Nth.")  # fmt: skip
@click.option("--resume/--no-resume", default=True, show_default=True, help="Go on with a run that is in the folder.")
@click.option("--json-progress", is_flag=True, help="Progress as a JSON object a second, on standard error.")
@click.option("--ray", "ray_address", is_flag=False, flag_value="local", metavar="[ADDRESS]",
              help="On a Ray cluster, each node into a folder of its own; a local one without an address.")  # fmt: skip
@settings(MediaCaps, without={"max_decode_bytes"})
@resuming()
def command(
    inputs: tuple[str, ...],
    *,
    output: Path,
    model: Path | None,
    workers: int | None,
    select_columns: str,
    on_error: str,
    resume: bool,
    json_progress: bool,
    ray_address: str | None,
    config: Path | None,
    **given: Any,
) -> None:
    """Token ids and preprocessed arrays of the rows in INPUT, in shards that a worker runs or a trainer reads.

    INPUT is a .jsonl or .parquet file, a .tar in WebDataset's manner, a folder of media, or - for JSON lines on
    standard input. A row is a List[Dict], an object with inputs or messages, or one with text and media. Exits with 1
    if it is finished and a row failed, which OUTPUT/errors.jsonl has; with 130 if it was interrupted, and 3 if it is
    not finished for another reason: the same command goes on then.
    """
    from mindie_mm.batch.gather import STDIN, told
    from mindie_mm.batch.progress import shown
    from mindie_mm.batch.run import run_batch
    from mindie_mm.batch.settings import Settings

    max_errors = _max_errors(on_error)
    if not resume and output.is_dir() and any(output.iterdir()):
        raise click.UsageError(f"{output} is not empty, and --no-resume was given")
    caps = {field.name: given.pop(field.name, None) for field in fields(MediaCaps)}
    media = configured(None, caps | {"config": config}).worker.media
    columns = tuple(column for part in select_columns.split(",") if (column := part.strip()))
    made = Settings(
        model="" if model is None else str(model.absolute()),
        inputs=tuple(one if one == STDIN else str(Path(one).absolute()) for one in inputs),
        stdin_folder=str(Path.cwd()) if STDIN in inputs else "",
        columns=columns,
        media=replace(media, max_decode_bytes=MediaCaps().max_decode_bytes),
        **given,
    )
    with shown("json" if json_progress else "auto") as show:
        manifest, left_out = run_batch(
            made, output, num_workers=workers, max_errors=max_errors, show=show, ray_address=ray_address
        )
    said = f"{manifest.num_rows} rows, {manifest.num_tokens} tokens, {manifest.num_items} media items in {output}"
    if left_out:
        said += f"; left out: {told(left_out)}"
    if manifest.num_errors:
        failed = "1 row" if manifest.num_errors == 1 else f"{manifest.num_errors} rows"
        click.echo(f"{said}; {failed} failed, see {output / 'errors.jsonl'}")
        raise SystemExit(ROWS_FAILED)
    click.echo(f"{said}; no row failed")


def _max_errors(on_error: str) -> int | None:
    """How many rows may fail."""
    if on_error == "skip":
        return None
    if on_error == "stop":
        return 0
    name, _, number = on_error.partition("=")
    if name != "fail-after" or not number.isdecimal() or int(number) < 1:
        raise click.BadParameter(
            f"{on_error!r} is none of skip, stop and fail-after=N, N at least 1", param_hint="--on-error"
        )
    return int(number) - 1
