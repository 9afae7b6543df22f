"""Tokenizes a chunk of rows. The shards do not depend on which process writes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from mindie_mm.batch.batch_messages import Finished, Step
from mindie_mm.batch.input.file_state import FileState
from mindie_mm.batch.input.gather import is_listed
from mindie_mm.batch.input.kept import arrow_type, values_of
from mindie_mm.batch.input.record import Record
from mindie_mm.batch.input.request import REQUEST, request_of
from mindie_mm.batch.input.row import Row, parse, printable, row_id, set_aside
from mindie_mm.batch.input.source import Chunk, Source
from mindie_mm.batch.output.shard import ShardInfo, ShardWriter
from mindie_mm.batch.settings import Run
from mindie_mm.device import host_memory
from mindie_mm.errors import ArenaFull, InputError, MediaError, MindieMMError, StorageError, error_name
from mindie_mm.inputs import Media, read_texts
from mindie_mm.processes import faults
from mindie_mm.shm.disk_writer import WriteBatchMemory
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import Prompt, PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.stores import FileStore

_log = logging.getLogger(__name__)


class Stage:
    """A tokenizer that writes shards into `folder`. Only one thread may use it."""

    def __init__(self, run: Run, folder: Path, states: Sequence[FileState] = ()) -> None:
        """Read the checkpoint.

        Args:
            run: Run whose shards are written.
            folder: Folder to write the shards to.
            states: States that the input's files must have. The default is their current states.

        Raises:
            InputError: An input cannot be read.
            UnsupportedCheckpoint: No family supports the checkpoint.
            StorageError: An input is not in the given state.

        """
        torch.set_num_threads(1)
        host_memory.keep_freed()
        self._run, self._settings = run, run.settings
        settings = run.settings
        self._folder = folder
        self._sources = settings.sources(folder, states, run.input_digests)
        # `is_listed` is called early, because a folder that is removed later would be treated as a file.
        self._places = [
            _Place(settings.media_folder(index), is_listed(given, settings.template))
            for index, given in enumerate(settings.inputs)
        ]
        self._aside = set_aside(settings.columns, settings.keep_columns)
        self._columns = {REQUEST: pa.string()} | {name: arrow_type(kind) for name, kind in run.columns.items()}
        self._last = self._sources[0]
        self._memory = WriteBatchMemory()
        self._store = FileStore()
        self._tokenizer = Tokenizer.from_pretrained(
            settings.model or None,
            self._store,
            family=settings.family or None,
            caps=settings.media,
            limit_mm_per_prompt=settings.limit_mm_per_prompt,
            parse_special=settings.parse_special,
        )

    def run(self, chunk: Chunk, doomed: Mapping[int, str]) -> Iterator[Step | Finished]:
        """Tokenize the rows of `chunk`, one after another.

        Rows in `doomed` are not tried, and are recorded with the error in `doomed`. A row that cannot be tokenized is
        recorded with its error. A shard gets its final name only if the input has not changed since the run began.

        Raises:
            StorageError: The shards cannot be written, or the input has changed.

        """
        source, shards = self._sources[chunk.file], list[ShardInfo]()
        if self._last is not source:
            self._last.close()  # only one file is open at a time
            self._last = source
        records, place = source.records(chunk.start, chunk.stop), self._places[chunk.file]
        with ExitStack() as left:
            shard = left.enter_context(self._shard(chunk, chunk.first_row))
            for number in range(chunk.first_row, chunk.stop_row):
                if shard.is_full and shard.num_rows:
                    source.require_unchanged()
                    shards.append(shard.finish())
                    shard = left.enter_context(self._shard(chunk, number))
                record, used = _next(records, source), shard.arena.used_bytes
                shard.records.add(record)
                error = doomed.get(number)
                error = self._add(shard, record, place, error)
                faults.point(f"row {number}")
                yield Step(number, shard.arena.used_bytes - used, error)
            source.require_unchanged()
            shards.append(shard.finish())
        yield Finished(chunk.number, shards)

    def _shard(self, chunk: Chunk, first_row: int) -> ShardWriter:
        settings, digest = self._settings, self._run.digest
        return ShardWriter(
            self._folder, digest, chunk.number, first_row, settings.shard_bytes, self._memory, self._columns
        )

    def _add(self, shard: ShardWriter, record: Record, place: _Place, doomed: str | None) -> str | None:
        """Add a record's row to the shard. Return its error, or None. A row with the error `doomed` is not tried."""
        self._store.arena = shard.arena
        self._store.stored.clear()
        name, kept, failed = row_id(record), dict[str, Any](), doomed
        try:
            kept = {REQUEST: request_of(record)}
            kept |= values_of(record, self._run.columns)
            if failed is None:
                prompt = self._prompt(self._parsed(record, place))
                shard.add(name, prompt, self._store.stored, kept)
                return None
        except MindieMMError as error:
            if place.is_listed and isinstance(error, MediaError):
                _require_listed(record, place.folder)
            if isinstance(error, ArenaFull) and isinstance(error.__cause__, OSError):  # the disk failed
                raise StorageError(str(error)) from error
            failed = printable(f"{error_name(error)}: {error}")
        except Exception as error:  # noqa: BLE001 - only this row fails, not the run
            _log.exception("row %s failed with an unexpected error", name)
            failed = f"OperationalError: the tokenizer failed: {type(error).__name__}"
        shard.add_error(name, failed, kept)
        return failed

    def _parsed(self, record: Record, place: _Place) -> Row:
        settings = self._settings
        return parse(record, place.folder, settings.template, self._aside, whole=settings.whole_conversations)

    def _prompt(self, row: Row) -> Prompt:
        tokenizer, settings = self._tokenizer, self._settings
        options = PromptOptions(settings.max_tokens, settings.truncate, parse_special=row.parse_special)
        return tokenizer.answer(
            TokenizeRequest(
                messages=None if row.messages is None else read_texts(row.messages, webui=settings.webui_images),
                items=read_texts(row.items or (), webui=settings.webui_images),
                chat=settings.chat if row.chat is None else row.chat,
                add_generation_prompt=row.add_generation_prompt,
                chat_template_kwargs=dict(row.template_kwargs or {}),
                options=options,
            )
        )


class _Place(NamedTuple):
    """Location of the media of an input."""

    folder: Path
    """Base folder for relative paths."""
    is_listed: bool
    """Whether the input is a media folder, whose files have been listed."""


def _require_listed(record: Record, folder: Path) -> None:
    """Raise StorageError if a media file was removed after its folder was listed."""
    for item in parse(record, folder, "").items or ():
        source = item.source if isinstance(item, Media) else None
        # If a name contains an escaped byte, such as \xe9, the file exists under the unescaped name.
        if isinstance(source, str) and "\\x" not in source and not os.path.lexists(source):
            raise StorageError(f"{source} was removed while the run was reading {folder}. Restore the file")


def _next(records: Iterator[Record], source: Source) -> Record:
    """Return the next record. Raise StorageError if the file has changed, is truncated or is damaged."""
    try:
        return next(records)
    except InputError:
        source.require_unchanged()  # if the file has changed, this is the error to report
        raise
    except (OSError, ValueError, NotImplementedError, StopIteration) as error:  # pyarrow raises the first three
        source.require_unchanged()
        raise StorageError(f"{source.path} cannot be read to the end: {str(error) or 'it ended early'}") from error
