"""`tokenize_dataset`, which `mindie-mm tokenize` calls, too."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from mindie_mm.batch.input.gather import Write, input_named, is_stream
from mindie_mm.batch.input.given_rows import rows_named, write_rows
from mindie_mm.batch.input.kept import kept_columns
from mindie_mm.batch.input.remote import matching
from mindie_mm.batch.output.store import Store, output_at
from mindie_mm.batch.progress import Style, shown
from mindie_mm.batch.run import run_batch
from mindie_mm.batch.settings import Settings
from mindie_mm.errors import InputError, os_errors_as
from mindie_mm.settings.config import NO_DECODERS, MediaCaps, MiB, Switch
from mindie_mm.settings.limits import PromptLimits, converted
from mindie_mm.settings.paths import local, working_directory

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Rows = Iterable[Mapping[str, Any] | Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class TokenizedRun:
    """Result of `tokenize_dataset`."""

    folder: Path | str
    """Folder of the run, or its URL. `Dataset(run.folder)` reads the rows."""
    num_rows: int
    num_errors: int
    """Number of rows that failed. `errors.jsonl` in the folder lists them."""
    num_tokens: int
    num_items: int
    """Number of media items."""
    left_out: Counter[str]
    """Number of files in media folders that were left out because they are not media, for each extension."""


def tokenize_dataset(
    inputs: Paths | Rows,
    output: str | os.PathLike[str],
    *,
    name: str = "rows",
    model: str | os.PathLike[str] | None = None,
    family: str = "",
    workers: int | None = None,
    shard_bytes: int = 256 * MiB,
    shard_rows: int = 128,
    limit: int | None = None,
    select_columns: str | Sequence[str] = (),
    keep_columns: str | Sequence[str] | Mapping[str, str] = (),
    whole_conversations: bool = False,
    assistant_spans: bool = False,
    plan: bool = False,
    template: str = "",
    chat_template: bool = True,
    parse_special: Switch = "on",
    max_tokens: int = 0,
    truncate: bool = False,
    webui_images: bool = False,
    limit_mm_per_prompt: PromptLimits | None = None,
    on_error: str = "skip",
    resume: bool = True,
    retry_errors: bool = False,
    part: str = "",
    staging: str | os.PathLike[str] | None = None,
    ray: str | None = None,
    sandbox: bool = False,
    progress: Style | None = None,
    **limits: Any,
) -> TokenizedRun:
    """Tokenize and preprocess rows, as `mindie-mm tokenize` does, to the same files.

    A second call with the same arguments continues the run. A script needs no `__main__` guard.

    Args:
        inputs: Path or URL of a file of rows, a list of these, a `datasets.Dataset`, or an iterable of rows, which are
            dicts or lists of items. Media in rows may be paths, bytes, PIL images or arrays.
        output: Folder for the run, which is created if it does not exist, or a URL in an object store.
        name: Name of the rows if `inputs` is an iterable or a data set. To continue the run, give the same rows under
            the same name.
        model: Checkpoint directory, by default the embedded checkpoint.
        family: Model family, by default the family in config.json.
        workers: Number of worker processes, or of Ray actors. The default is one per CPU.
        shard_bytes: Size in bytes at which a shard ends.
        shard_rows: Number of rows at which a shard ends.
        limit: Number of rows to tokenize, or None for all rows.
        select_columns: Columns or keys to read, as a list or separated by commas. The default is all.
        keep_columns: Columns or keys to copy to the output, as a list of names, as a mapping from names to types, or as
            a string such as "label,score=double".
        whole_conversations: Whether to keep the answers in conversations, for training.
        assistant_spans: Whether to record which tokens the assistant writes, for training.
        plan: Whether to count tokens from the headers of media instead of preprocessing the media.
        template: Prompt for each item of a folder or tar file, with `{media}` where the item belongs.
        chat_template: Whether to apply the checkpoint's chat template to rows of items.
        parse_special: Whether control tokens in texts without a chat template are control tokens: "on" or "off".
        max_tokens: Maximum number of tokens of a row, or 0 for no limit. A longer row fails.
        truncate: Whether to shorten longer rows instead.
        webui_images: Whether to read images in texts, in the format of text-generation-webui.
        limit_mm_per_prompt: Maximum number of media items in a row, such as {"image": 4, "video": 1}.
        on_error: What a failed row does: "skip" records its error, "stop" stops the run, and "fail-after=N" stops the
            run at the Nth failed row.
        resume: Whether to continue the run in `output`. Otherwise, the folder must be empty.
        retry_errors: Whether to tokenize the shards with failed rows again.
        part: Part of the rows to tokenize, such as "1/4".
        staging: Local folder for the open shards of a run in an object store. The default is the temporary directory.
        ray: Address of a Ray cluster, or "local" for a new cluster on this machine.
        sandbox: Whether each worker decodes media in a sandboxed process, for files that you do not trust.
        progress: "auto" shows the progress on standard error, as a bar or as a line every 10 s, "json" as an object
            every second, and "off" not at all. The default is "auto" if standard error is a terminal, and else "off".
        limits: Limits on decoding media, such as `max_image_pixels`.

    Raises:
        InputError: An argument is invalid, the rows cannot be read, or the folder contains another run.
        StorageError: The output cannot be written, or an input file changed.
        ProcessDied: A worker died before it was ready, or at a row that should have been skipped.
        TooManyErrors: More rows failed than `on_error` allows.

    """
    for one, text in (("part", part), ("ray", "" if ray is None else ray)):
        if not isinstance(text, str):
            raise InputError(f"{one}={text!r} must be a string")
    resume, retry_errors = converted("resume", resume, bool), converted("retry_errors", retry_errors, bool)
    max_errors = _max_errors(on_error)
    folder = output_at(output)
    if not resume and _has_files(folder):
        raise InputError(f"{folder} is not empty; --no-resume needs an empty folder")
    if unknown := limits.keys() - ({field.name for field in fields(MediaCaps)} - NO_DECODERS):
        raise TypeError(f"tokenize_dataset() got an unexpected keyword argument {min(unknown)!r}")
    media = MediaCaps(**limits)
    named, rows = _named(inputs, name, media)
    options = {
        "family": family,
        "shard_bytes": shard_bytes,
        "shard_rows": shard_rows,
        "limit": limit,
        "columns": _names("select_columns", select_columns),
        "whole_conversations": whole_conversations,
        "assistant_spans": assistant_spans,
        "plan": plan,
        "template": template,
        "chat": chat_template,
        "parse_special": parse_special,
        "max_tokens": max_tokens,
        "truncate": truncate,
        "webui_images": webui_images,
        "limit_mm_per_prompt": limit_mm_per_prompt or {},
    }
    hints = get_type_hints(Settings, include_extras=True)
    checked: dict[str, Any] = {
        one: value if isinstance(value, str) and hints[one] is str else converted(one, value, hints[one])
        for one, value in options.items()
    }
    settings = Settings(
        model="" if model is None else str(local("model", model)),
        inputs=named,
        stdin_folder=working_directory() if any(map(is_stream, named)) else "",
        keep_columns=kept_columns(
            keep_columns if isinstance(keep_columns, Mapping) else _names("keep_columns", keep_columns)
        ),
        media=media,
        **checked,
    )
    workers, sandbox = converted("workers", workers, int | None), converted("sandbox", sandbox, bool)
    with shown(progress) as show:
        manifest, left_out = run_batch(
            settings,
            folder,
            num_workers=workers,
            max_errors=max_errors,
            show=show,
            ray_address=ray,
            part=part,
            retry_errors=retry_errors,
            sandbox=sandbox,
            rows=rows,
            staging=None if staging is None else local("staging", staging),
        )
    return TokenizedRun(
        folder, manifest.num_rows, manifest.num_errors, manifest.num_tokens, manifest.num_items, left_out
    )


def _has_files(folder: Path | str) -> bool:
    if isinstance(folder, str):
        return bool(Store(folder).sizes())
    with os_errors_as(InputError, f"{folder} cannot be listed"):
        return folder.is_dir() and any(folder.iterdir())


def _named(inputs: Any, name: str, media: MediaCaps) -> tuple[tuple[str, ...], dict[str, Write]]:
    """Return the names of the inputs that a run records. For rows given as Python objects, also return their writer."""
    paths = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    if isinstance(paths, list | tuple) and paths and all(isinstance(one, str | os.PathLike) for one in paths):
        return tuple(input_named(one) for given in map(os.fspath, paths) for one in matching(given)), {}
    own = rows_named(inputs, name)
    return (own,), {own: partial(write_rows, inputs, media)}


def _names(name: str, given: str | Sequence[str]) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else converted(name, given, tuple[str, ...])
    return tuple(column for part in parts if (column := part.strip()))


def _max_errors(on_error: str) -> int | None:
    """Return the maximum number of rows that may fail, or None for any number."""
    if on_error == "skip":
        return None
    if on_error == "stop":
        return 0
    name, _, number = str(on_error).partition("=")
    if name != "fail-after" or not number.isdecimal() or int(number) < 1:
        raise InputError(
            f"on_error is {on_error!r}, which is not valid; use skip, stop or fail-after=N, where N is at least 1"
        )
    return int(number) - 1
