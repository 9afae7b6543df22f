"""mindie-mm tokenize."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH, RUN_FOLDER, TEXT
from mindie_mm.cli.resuming import ROWS_FAILED, resuming
from mindie_mm.cli.settings import SettingsCommand, configured, settings
from mindie_mm.inputs.checks import counted
from mindie_mm.processes.interrupts import importing
from mindie_mm.settings.config import NO_DECODERS, MediaCaps, MiB

_LIMITS = {field.name for field in fields(MediaCaps)} - NO_DECODERS


@click.command("tokenize", cls=SettingsCommand)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--output", type=RUN_FOLDER, required=True,
              help="Folder for the run, which is created if it does not exist, or a URL in an object store, such as "
              "s3://bucket/run.")  # fmt: skip
@click.option("--model", type=PATH, help="Checkpoint directory.  [default: the embedded checkpoint]")
@click.option("--family", default="", help="Model family.  [default: the family in config.json]")
@click.option("--workers", type=click.IntRange(1),
              help="Number of worker processes, or of Ray actors.  [default: one per CPU]")  # fmt: skip
@click.option("--shard-bytes", type=click.IntRange(1), default=256 * MiB, show_default=True,
              help="Size in bytes at which a shard ends.")  # fmt: skip
@click.option("--shard-rows", type=click.IntRange(1), default=128, show_default=True,
              help="Number of rows at which a shard ends. A worker processes that many rows at a time.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Tokenize only the first N rows.")
@click.option("--select-columns", default="",
              help="Comma-separated columns of tables, or keys of JSON objects, to read.  [default: all]")  # fmt: skip
@click.option("--keep-columns", default="", metavar="NAME[=TYPE],...",
              help="Columns of tables, or keys of JSON objects, to copy to the output, such as label or "
              "label=int64.")  # fmt: skip
@click.option("--whole-conversations", is_flag=True,
              help="Keep the answers in conversations, for training.  [default: a conversation ends before its first "
              "answer, but messages are kept as they are]")  # fmt: skip
@click.option("--assistant-spans", is_flag=True,
              help="Record which tokens the assistant writes in conversations, for training. A conversation in which "
              "they cannot be located fails.")  # fmt: skip
@click.option("--plan", is_flag=True,
              help="Count tokens from the headers of media, without preprocessing the media. The run has ids and "
              "places of media, but no arrays, so that no model can be run on it.")  # fmt: skip
@click.option("--template", default="",
              help="Prompt for each item of a folder or tar file, with {media} where the item belongs.")  # fmt: skip
@click.option("--chat-template/--no-chat-template", default=True, show_default=True,
              help="Apply the checkpoint's chat template to rows of items, as one user turn.")  # fmt: skip
@click.option("--parse-special", type=click.Choice(["on", "off"]), default="on", show_default=True,
              help="Treatment of control tokens in texts without a chat template. on: they are control tokens, except "
              "those of media items. off: they are plain text.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(0), default=0,
              help="Maximum number of tokens of a row. A longer row fails.  [default: no limit]")  # fmt: skip
@click.option("--truncate", is_flag=True,
              help="Shorten rows of more than --max-tokens tokens: remove their oldest text and whole media "
              "items.")  # fmt: skip
@click.option("--webui-images", is_flag=True,
              help="Read images in texts, in the format of text-generation-webui: "
              '<img src="data:image/jpeg;base64,...">.')  # fmt: skip
@click.option("--limit-mm-per-prompt", type=TEXT, metavar="LIMITS",
              help="Maximum number of media items in a row, such as image=4,video=1 or, as JSON, "
              '{"image": 4, "video": 1}. A row with more items fails.  [default: no limit other than the '
              "model's]")  # fmt: skip
@click.option("--on-error", default="skip", show_default=True, metavar="skip|stop|fail-after=N",
              help="When a row fails, record its error and continue (skip), stop the run (stop), or stop it at the Nth "
              "failed row (fail-after=N).")  # fmt: skip
@click.option("--resume/--no-resume", default=True, show_default=True,
              help="Continue the run in the folder --output.")  # fmt: skip
@click.option("--retry-errors", is_flag=True,
              help="Tokenize the shards with failed rows again, after you have removed the cause.")  # fmt: skip
@click.option("--part", default="", metavar="I/N",
              help="Tokenize only part I of N parts of the rows, for example on one of N machines. `mindie-mm merge` "
              "combines the folders of the parts.")  # fmt: skip
@click.option("--staging", type=PATH, metavar="FOLDER",
              help="Local folder for unfinished shards if --output is a URL.  [default: the temporary "
              "directory]")  # fmt: skip
@click.option("--json-progress", is_flag=True, help="Write progress to standard error as one JSON object per second.")
@click.option("--ray", is_flag=False, flag_value="local", metavar="[ADDRESS]",
              help="Run on the Ray cluster at ADDRESS, or on a local cluster. Each node writes to its own "
              "folder.")  # fmt: skip
@click.option("--sandbox", is_flag=True,
              help="Decode media in a sandboxed process of each worker, for files that you do not trust. A row with a "
              "image of 640x480 pixels then takes 1.4 times the processor time.")  # fmt: skip
@settings(MediaCaps, without=NO_DECODERS)
@resuming()
def command(
    inputs: tuple[str, ...],
    *,
    output: Path | str,
    limit_mm_per_prompt: str | None,
    json_progress: bool,
    config: Path | None,
    **given: Any,
) -> None:
    """Tokenize and preprocess the rows of INPUT, for `mindie-mm generate` or for training.

    INPUT is a .jsonl, .json or .parquet file, a .tar file in WebDataset format, a folder of media, or JSON lines from a
    pipe or from standard input (-). Files and folders may be URLs that fsspec reads (s3://, gs://, hf://). JSON and
    tars may be compressed as .gz or .zst. A row is a List[Dict], an object with `inputs` or `messages`, an object with
    text and media, or a conversation of a common data set.

    Exit status: 0 if all rows succeeded, 1 if some rows failed (OUTPUT/errors.jsonl lists them), 130 if interrupted, 3
    if the run is not finished for another reason. Run the same command again to continue.
    """
    with importing():
        from mindie_mm.batch.input.media_folder import left_out_summary, unread_tables
        from mindie_mm.batch.tokenizing import tokenize_dataset

    limits = {name: given.pop(name, None) for name in _LIMITS}
    worker = configured(None, limits | {"config": config, "limit_mm_per_prompt": limit_mm_per_prompt}).worker
    run = tokenize_dataset(
        inputs,
        output,
        limit_mm_per_prompt=worker.limit_mm_per_prompt,
        progress="json" if json_progress else "auto",
        **given,
        **{name: getattr(worker.media, name) for name in _LIMITS},
    )
    message = (
        f"{counted(run.num_rows, 'row')}, {counted(run.num_tokens, 'token')}, {counted(run.num_items, 'media item')} "
        f"in {run.folder}"
    )
    if run.left_out:
        message += f"; left out: {left_out_summary(run.left_out)}"
        if why := unread_tables(run.left_out, given["template"] or ""):
            message += f". {why}"
    if run.num_errors:
        click.echo(f"{message}; {counted(run.num_errors, 'row')} failed, see {run.folder}/errors.jsonl")
        raise SystemExit(ROWS_FAILED)
    click.echo(f"{message}; no row failed")
