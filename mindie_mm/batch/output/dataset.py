"""Reads a finished run as a sequence of samples, for training or inspection."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from pathlib import Path
from threading import Lock
from typing import Any, SupportsIndex, overload
from weakref import WeakSet

from cachetools import LRUCache
from numpy.typing import NDArray

from mindie_mm.batch.input.remote import RemoteFile, file_at, reading_run
from mindie_mm.batch.output.array_file import file_bytes
from mindie_mm.batch.output.collate import Labels, Padding, collate
from mindie_mm.batch.output.manifest import Manifest, Shard
from mindie_mm.batch.output.order import Order
from mindie_mm.batch.output.row_arrays import Arrays, fetch, require_digests, specs_of, views
from mindie_mm.batch.output.sample import RunModel, Sample
from mindie_mm.batch.output.shard import arrays_path, read_table, table_path
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.batch.output.shard_table import ShardTable
from mindie_mm.errors import InputError
from mindie_mm.settings.limits import converted
from mindie_mm.settings.paths import absolute
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.mapping import map_file

_MAPPED_FILES = 8
_FETCHED_ROWS = 8
"""Number of rows whose arrays are fetched at the same time if the rows of a run in a store are read in order."""
_TABLE_BYTES = 128 << 20
"""Maximum total size in bytes of the tables in memory. Reading a table takes far longer than reading a row of it."""


class Dataset(Sequence[Sample]):
    """Rows of a finished run, in input order. A dataset may be shared by threads and pickled for other processes.

    If the run is in an object store, the table of a shard is fetched as a whole, and the arrays of a row with one
    request. Their digests are compared.
    """

    def __init__(self, folder: str | Path, model: str | Path | None = None) -> None:
        """Open a run.

        Args:
            folder: Folder of the run, or its URL in an object store, such as "s3://bucket/run/".
            model: Directory of the checkpoint that tokenized the rows, if it has been moved since.

        Raises:
            InputError: The folder does not contain a finished run, has only a part of one, or its store cannot be read.

        """
        self.folder = file_at(folder)
        self.manifest = Manifest.read(self.folder)
        run = self.manifest.run
        path = run.settings.model if model is None else str(absolute(model))
        self._model = RunModel(path, run.settings.family, run.model_digest)
        if run.part:
            raise InputError(f"{self.folder} has part {run.part} of a run. Combine the parts with `mindie-mm merge`")
        self._firsts = [shard.info.first_row for shard in self.manifest.shards]
        self.begin()

    def __len__(self) -> int:
        return self.manifest.num_rows

    @overload
    def __getitem__(self, row: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, row: slice) -> list[Sample]: ...

    def __getitem__(self, row: SupportsIndex | slice) -> Sample | list[Sample]:
        """Return the sample of a row, or a list of samples for a slice. Negative numbers count from the end.

        Raises:
            IndexError: There is no such row.
            CorruptReference: A file is missing, or has been changed since the run.
            StorageError: The store of the folder fails.

        """
        if isinstance(row, slice):
            return self.__getitems__(range(*row.indices(len(self))))
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Iterable[SupportsIndex]) -> list[Sample]:
        """Return the samples of several rows. torch's `DataLoader` calls this method for each batch.

        The arrays of these rows are fetched from a store at the same time. `__getitem__` lists the errors.
        """
        records = [self.record(self._number(row)) for row in rows]
        return [*map(self._sample, records, self._arrays(records))]

    def __iter__(self) -> Iterator[Sample]:
        together = _FETCHED_ROWS if isinstance(self.folder, RemoteFile) else 1
        for row in range(0, len(self), together):
            yield from self[row : row + together]

    def collate(
        self,
        samples: Sequence[Sample],
        *,
        padding: Padding = "right",
        labels: Labels | None = None,
        packing: int = 0,
    ) -> dict[str, Any]:
        """Return a batch for transformers' model. The arrays of media are the same as in `Sample.model_inputs`.

        Args:
            samples: Samples of this dataset without errors.
            padding: Side on which shorter rows are padded.
            labels: Tokens that count in the loss: those of the assistant's turns, or all tokens. Tokens of media never
                count. None leaves out the labels.
            packing: Number of tokens of a row, into which several samples are packed. If it is 0, each row has one
                sample. transformers tells packed samples apart by their `position_ids`, int64 [rows, packing], or
                [1 + axes, rows, packing] for models with positions on several axes. It does so only without a mask, and
                if `use_cache` is False.

        Raises:
            InputError: An argument has a wrong type, a sample has an error, is longer than `packing` or has no known
                turns of the assistant, or the model cannot be trained on packed samples. The message has the reason.

        """
        return collate(samples, self._model.processor(), self._model.pad_token(), padding, labels, packing)

    def order(self, seed: int = 0, epoch: int = 0, *, consumed: int = 0, rank: int = 0, num_ranks: int = 1) -> Order:
        """Return the numbers of the rows that a rank reads in an epoch, shuffled and without failed rows.

        The order depends only on `seed`, `epoch` and the rows. To resume an epoch with any number of ranks and workers,
        pass the number of samples that all ranks have consumed. Rows of eight shards are shuffled together, so that a
        worker keeps few files open. If the ranks' numbers of samples would differ, some rows are read twice.

        Args:
            seed: Number that selects an order.
            epoch: Number of the epoch.
            consumed: Number of samples of this epoch that all ranks together have consumed.
            rank: Number of this rank, from 0.
            num_ranks: Number of ranks.

        Raises:
            InputError: A number is not an integer or is out of its range.
            StorageError: The list of failed rows cannot be read.

        """
        given = {"seed": seed, "epoch": epoch, "consumed": consumed, "rank": rank, "num_ranks": num_ranks}
        seed, epoch, consumed, rank, num_ranks = (converted(name, number, int) for name, number in given.items())
        shards = [range(shard.info.first_row, shard.info.stop_row) for shard in self.manifest.shards]
        failed = self.manifest.failed_rows(self.folder) if self.manifest.num_errors else ()
        return Order(shards, failed, (seed, epoch), consumed, rank, num_ranks)

    def record(self, number: int) -> ShardRow:
        """Return the row as it is recorded in its table."""
        return self._table(self.shard(number)).row(number)

    def shard(self, number: int) -> Shard:
        """Return the shard that contains the row `number`."""
        return self.manifest.shards[bisect_right(self._firsts, number) - 1]

    def specs(self, row: ShardRow) -> list[dict[str, ArraySpec]]:
        """Return the shapes and types of the arrays of each media item of a row by name, without reading the arrays.

        Raises:
            CorruptReference: The table of the row's shard is damaged.

        """
        return [*map(dict, self._table(self.shard(row.row)).specs(row.row))]

    def arrays(self, row: ShardRow, *, verified: bool = False) -> list[dict[str, NDArray[Any]]]:
        """Return the arrays of each media item of a row by name. They are read-only.

        Compare the digest of each array if the folder is in a store, or with `verified`.

        Raises:
            CorruptReference: The file is missing, or has been changed since the run.
            StorageError: The store of the folder fails.

        """
        return self._arrays([row], verified=verified)[0]

    def verify(self, number: int) -> None:
        """Check that the files of the shard with the row `number` have the content that the run wrote.

        In a store, only the table is checked, because the arrays of each row are checked when they are fetched.

        Raises:
            CorruptReference: A file has different content or is missing.
            StorageError: The store of the folder fails.

        """
        shard = self.shard(number)
        if isinstance(self.folder, RemoteFile):
            self._table(shard)
        else:
            shard.verify(self.folder)

    def _arrays(self, rows: Sequence[ShardRow], *, verified: bool = False) -> list[Arrays]:
        if isinstance(self.folder, RemoteFile):
            return fetch(self.folder, [(row, self.shard(row.row).info) for row in rows])
        return [self._mapped(self.folder, row, verified=verified) for row in rows]

    def _mapped(self, folder: Path, row: ShardRow, *, verified: bool) -> Arrays:
        if not row.arrays:
            return []
        shard = self.shard(row.row)
        path, data = self._file(folder, shard.info.first_row)
        is_whole = len(data) == file_bytes(shard.info.num_bytes)
        specs = self._table(shard).specs(row.row) if is_whole else specs_of(row, path, len(data))
        if verified:
            require_digests(row, path, data)
        return views(row, specs, data)

    def _number(self, row: SupportsIndex) -> int:
        number = index(row)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"there is no row {row}; the data set has {len(self)} rows")
        return number

    def _sample(self, record: ShardRow, arrays: Arrays) -> Sample:
        if record.error is not None:
            return Sample(record.row, record.id, None, (), (), record.error, record.columns)
        prompt = record.prompt
        return Sample(
            record.row,
            record.id,
            prompt.ids,
            prompt.spans,
            arrays,
            columns=record.columns,
            assistant=record.assistant_spans,
            model=self._model,
        )

    def _table(self, shard: Shard) -> ShardTable:
        info = shard.info
        with self._lock:
            found = self._tables.get(info.first_row)
        if found is not None:
            return found
        # Read without the lock, so that other threads can continue.
        if isinstance(self.folder, RemoteFile):
            read = shard.read_table(self.folder)
        else:
            read = read_table(table_path(self.folder, info.first_row), info.num_rows)
        table = ShardTable(read, self.folder, info)
        with self._lock:
            self._tables[info.first_row] = table
        return table

    def _file(self, folder: Path, first_row: int) -> tuple[Path, memoryview]:
        with self._lock:
            found = self._files.get(first_row)
        if found is not None:
            return found
        path = arrays_path(folder, first_row)
        with reading_run(path), path.open("rb") as file:
            data = map_file(file.fileno(), os.fstat(file.fileno()).st_size)
        with self._lock:
            return self._files.setdefault(first_row, (path, data))

    def begin(self) -> None:
        """Create the caches and their lock, also after a fork. The child has no thread to release the lock."""
        self._tables = LRUCache[int, ShardTable](_TABLE_BYTES, getsizeof=_size_of)
        self._files = LRUCache[int, tuple[Path, memoryview]](_MAPPED_FILES)
        self._lock = Lock()
        _datasets.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open files. The process that receives it opens the files itself."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.begin()


def _size_of(table: ShardTable) -> int:
    return min(table.num_bytes, _TABLE_BYTES)


_OF_THE_PROCESS = frozenset({"_tables", "_files", "_lock"})
_datasets: WeakSet[Dataset] = WeakSet()


def _begin_again() -> None:
    for dataset in [*_datasets]:
        dataset.begin()


os.register_at_fork(after_in_child=_begin_again)
