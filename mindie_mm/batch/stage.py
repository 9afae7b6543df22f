"""Tokenizes a chunk of rows. The shards do not depend on which process writes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import torch

from mindie_mm.batch.batch_messages import Finished, Step
from mindie_mm.batch.input.file_state import FileState
from mindie_mm.batch.input.gather import gathered_path, is_folder
from mindie_mm.batch.input.kept import arrow_type, values_of
from mindie_mm.batch.input.media_folder import is_list
from mindie_mm.batch.input.record import Record
from mindie_mm.batch.input.remote import RemoteFile, fetched
from mindie_mm.batch.input.request import REQUEST, request_of
from mindie_mm.batch.input.row import Row, parse, set_aside
from mindie_mm.batch.input.row_id import printable, row_id
from mindie_mm.batch.input.source import Chunk, Source
from mindie_mm.batch.output.array_file import ArrayFile
from mindie_mm.batch.output.disk_writer import StoredArray, WriteBatchMemory
from mindie_mm.batch.output.run_folder import RunFolder
from mindie_mm.batch.output.shard import ShardInfo, ShardWriter, finished_shard, read_table, table_path
from mindie_mm.batch.output.shard_row import ASSISTANT
from mindie_mm.batch.settings import Run
from mindie_mm.device import host_memory
from mindie_mm.errors import InputError, MediaError, MindieMMError, StorageError, error_name, naming, os_errors_as
from mindie_mm.inputs import Media, read_texts
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.processes import faults
from mindie_mm.settings.paths import is_url
from mindie_mm.shm.format.item import ITEM
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.planning import PlannedItem
from mindie_mm.tokenize.prompt import Prompt, PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.stores import Preprocessed, Store, Writer
from mindie_mm.tool_calls.history import adapted
from mindie_mm.tool_calls.registry import parser_of

_log = logging.getLogger(__name__)

_MAX_ITEM_BYTES = 2**34
"""Size in bytes of the memory that a worker shares with its decoder. The kernel allocates only pages with arrays."""


class Stage:
    """A tokenizer that writes shards into `folder`. Only one thread may use it."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        states: Sequence[FileState] = (),
        destination: RunFolder | None = None,
        *,
        sandbox: bool = False,
    ) -> None:
        """Read the checkpoint.

        Args:
            run: Run whose shards are written.
            folder: Folder to write the shards to.
            states: States that the input's files must have. The default is their current states.
            destination: Folder of the run, which may be in a store. The default is the local `folder`.
            sandbox: Whether a sandboxed process decodes media, instead of this process.

        Raises:
            InputError: An input cannot be read.
            ProcessDied: The sandboxed process cannot be started.
            UnsupportedCheckpoint: No family supports the checkpoint.
            StorageError: An input is not in the given state.

        """
        torch.set_num_threads(1)
        host_memory.keep_freed()
        self._run, self._settings = run, run.settings
        settings = run.settings
        self._folder, self._destination = folder, destination or RunFolder(folder)
        self._sources = settings.sources(folder, states, run.input_digests)
        # `is_folder` is called early, because a folder that is removed later would be treated as a file.
        self._places = [
            _Place(settings.media_folder(index), is_folder(given) and is_list(gathered_path(folder, index)))
            for index, given in enumerate(settings.inputs)
        ]
        self._aside = set_aside(settings.columns, settings.keep_columns)
        self._columns = {REQUEST: pa.string()} | {name: arrow_type(kind) for name, kind in run.columns.items()}
        if settings.assistant_spans:
            self._columns[ASSISTANT] = pa.list_(pa.list_(pa.int64()))
        self._last = self._sources[0]
        self._memory = WriteBatchMemory()
        self._store = _PlanStore() if settings.plan else _ShardStore()
        self._tokenizer = Tokenizer.from_pretrained(
            settings.model or None,
            self._store,
            family=settings.family or None,
            caps=settings.media,
            limit_mm_per_prompt=settings.limit_mm_per_prompt,
            parse_special=settings.parse_special,
            decoders=1 if sandbox else 0,
            max_item_bytes=_MAX_ITEM_BYTES,
        )
        traits = self._tokenizer.prompts.traits.chat
        checkpoint = Checkpoint.open(settings.model or None)
        parser = parser_of(traits, self._tokenizer.prompts.added_tokens, checkpoint)
        self._traits, self._adapt = traits, partial(adapted, traits=traits, parser=parser)

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
        records, row = source.records(chunk.start, chunk.stop), chunk.first_row
        while row < chunk.stop_row:
            shard = finished_shard(self._folder, row, self._run.digest)
            if shard is not None and shard.stop_row <= chunk.stop_row:
                shard.require_records(records, source.name, str(self._destination))
                yield from self._steps(shard)
            else:
                shard = yield from self._write(chunk, row, records, doomed)
            shards.append(shard)
            row = shard.stop_row
        yield Finished(chunk.number, shards)

    def _steps(self, shard: ShardInfo) -> Iterator[Step]:
        """Yield the rows of a shard that an earlier call has finished."""
        table = read_table(table_path(self._folder, shard.first_row), shard.num_rows, ["row", "error"])
        for record in table.to_pylist():
            is_first = record["row"] == shard.first_row
            yield Step(record["row"], shard.num_bytes if is_first else 0, record["error"], is_kept=True)

    def _write(
        self, chunk: Chunk, first_row: int, records: Iterator[Record], doomed: Mapping[int, str]
    ) -> Generator[Step, None, ShardInfo]:
        """Write a shard of rows of the chunk, and yield the rows. Rows that an earlier call has written are kept."""
        source, place = self._sources[chunk.file], self._places[chunk.file]
        digest, shard_bytes = self._run.digest, self._settings.shard_bytes
        with ShardWriter(
            self._folder, digest, first_row, shard_bytes, self._memory, self._columns, self._destination
        ) as shard:
            while (number := shard.next_row) < chunk.stop_row and not shard.is_full:
                record, used = _next(records, source), shard.file.used_bytes
                shard.records.add(record)
                error, is_kept = self._add(shard, record, place, doomed.get(number))
                faults.point(f"row {number}")
                yield Step(number, shard.file.used_bytes - used, error, is_kept)
            source.require_unchanged()
            return shard.finish()

    def _add(self, shard: ShardWriter, record: Record, place: _Place, failed: str | None) -> tuple[str | None, bool]:
        """Add a record's row to the shard. A row that has `failed` is not tried.

        Returns:
            The row's error, or None, and whether an earlier call has written the row.

        """
        columns = dict[str, Any]()
        try:
            columns[REQUEST] = request_of(record)
            columns |= values_of(record, self._run.columns)
        except InputError as error:
            failed = failed or _reason(error)
        if (kept := shard.keep(columns)) is not None:
            return kept.error, True
        self._store.begin_row(shard.next_row, shard.file)
        name = row_id(record)
        try:
            if failed is None:
                prompt = self._prompt(self._parsed(record, place))
                shard.add(name, prompt, self._store.stored, columns)
                return None, False
        except StorageError:
            raise
        except MindieMMError as error:
            if place.is_listed and isinstance(error, MediaError):
                _require_listed(record, place.folder)
            failed = _reason(error)
        except Exception as error:  # noqa: BLE001 - only this row fails, not the run
            _log.exception("row %s failed with an unexpected error", name)
            failed = f"OperationalError: the tokenizer failed: {type(error).__name__}"
        shard.add_error(name, failed, columns)
        return failed, False

    def _parsed(self, record: Record, place: _Place) -> Row:
        settings = self._settings
        return parse(
            record,
            place.folder,
            settings.template,
            self._aside,
            whole=settings.whole_conversations,
            chat=settings.chat,
            adapt=self._adapt,
        )

    def _prompt(self, row: Row) -> Prompt:
        tokenizer, settings = self._tokenizer, self._settings
        items, webui = row.items or (), settings.webui_images
        end = len(items) - row.answer_items
        question, answer = (read_texts(part, webui=webui) for part in (items[:end], items[end:]))
        options = PromptOptions(
            settings.max_tokens,
            settings.truncate,
            parse_special=row.parse_special,
            marks_assistant=settings.assistant_spans,
            answer_items=len(answer),
        )
        variables, effort = self._traits.with_effort(row.template_kwargs, row.reasoning_effort)
        request = TokenizeRequest(
            messages=None if row.messages is None else read_texts(row.messages, webui=webui),
            items=[*question, *answer],
            chat=settings.chat if row.chat is None else row.chat,
            add_generation_prompt=row.add_generation_prompt,
            chat_template_kwargs=variables | ({"reasoning_effort": effort} if effort else {}),
            options=options,
        )
        return tokenizer.answer(request.with_media(fetched))


class _ShardStore(Store):
    """A store in the file of arrays of a shard. Ids get no handle words."""

    needs_path_file: ClassVar[bool] = False

    def __init__(self) -> None:
        self.preprocessed = Preprocessed()
        self._file: ArrayFile | None = None
        self._row = 0
        self.stored: list[tuple[bytes, list[StoredArray]]] = []
        """Digest and arrays of each item of the row, in order."""

    def begin_row(self, row: int, file: ArrayFile) -> None:
        """Store the next items in `file`, as items of the row with this number."""
        self._row, self._file = row, file
        self.stored.clear()

    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[PlannedItem], path_file: Path | None, writer: Writer
    ) -> list[Prompt]:
        assert self._file is not None
        mark = self._file.mark()
        try:
            for item in items:
                with naming(item.name):
                    stored, arrays = self._file.allocate(f"{self._row}.{len(self.stored)}", item.specs)
                    arrays[ITEM][...] = item.shape.values
                    digest = await writer.write(item, {name: arrays[name] for name in item.plan.specs})
                self.stored.append((digest, stored))
        except BaseException:
            self._file.roll_back(mark)
            self.stored.clear()
            raise
        return [*prompts]


class _PlanStore(_ShardStore):
    """A store of digests without arrays, for a run that only plans its media."""

    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[PlannedItem], path_file: Path | None, writer: Writer
    ) -> list[Prompt]:
        self.stored += [(await writer.digest(item), []) for item in items]
        return [*prompts]


class _Place(NamedTuple):
    """Location of the media of an input."""

    folder: Path | str
    """Base folder for relative paths, or its URL."""
    is_listed: bool
    """True if the input is a media folder, whose files have been listed."""


def _require_listed(record: Record, folder: Path | str) -> None:
    """Raise StorageError if a media file was removed after its folder was listed."""
    for item in parse(record, folder, "").items or ():
        source = item.source if isinstance(item, Media) else None
        # If a name contains an escaped byte, such as \xe9, the file exists under the unescaped name.
        if isinstance(source, str) and "\\x" not in source and not _exists(source, str(folder)):
            raise StorageError(f"{source} was removed while the run was reading {folder}. Restore the file")


def _exists(path: str, folder: str) -> bool:
    if not is_url(path):
        return os.path.lexists(path)
    if "::" in path:  # cannot be read, but exists
        return True
    try:
        return RemoteFile(path).exists()
    except OSError:
        with os_errors_as(StorageError, f"{folder} cannot be read"):
            if not RemoteFile(folder).exists():  # the store itself fails, because it has listed the folder before
                raise
        return True  # only the row of this object fails


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


def _reason(error: MindieMMError) -> str:
    return printable(f"{error_name(error)}: {error}")
