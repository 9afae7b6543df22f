"""Counts the finished and the failed rows of a run, including the rows of earlier calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindie_mm.batch.batch_messages import Step
from mindie_mm.batch.input.file_state import FileState
from mindie_mm.batch.input.source import Chunk, Source
from mindie_mm.batch.output.run_folder import RunFolder
from mindie_mm.batch.output.shard import ShardInfo, complete_shards
from mindie_mm.batch.progress import Progress, Show
from mindie_mm.batch.settings import Run
from mindie_mm.errors import StorageError, TooManyErrors, os_errors_as


class Tally:
    """The count of finished rows of a run. Each change is passed to `show`."""

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        sources: Sequence[Source],
        max_errors: int | None,
        show: Show,
        begun_states: Sequence[FileState] = (),
        share: float = 1.0,
    ) -> None:
        """Create a tally.

        Args:
            run: Run to count.
            folder: Folder of the run.
            sources: Files of rows.
            max_errors: Maximum number of rows that may fail, or None for any number.
            show: Callback for each row.
            begun_states: States of the files during the call that began the run.
            share: Share of the input that the run processes.

        """
        self._sources = sources
        self._doubted = {
            index
            for index, (source, state) in enumerate(zip(sources, begun_states, strict=False))
            if source.state != state and not source.is_digested_whole
        }
        """Indices of files that may have changed since an earlier call in parts that the fingerprint does not cover."""
        self._digest, self._limit = run.digest, run.settings.limit
        self._folder = folder
        self._max_errors = max_errors
        self._show = show
        sizes = [source.state.size for source in sources]
        each = zip(sizes, sources, strict=True)
        total = max(1, sum(sizes)) * (share or 1.0)
        self._shares = [size / total / max(1, source.size) for size, source in each]
        """For each source, the share of one byte, or one row of a table, in the input that is processed."""
        self.done = self._earlier = Progress()
        show(self.done, self._earlier)

    def is_done(self, chunk: Chunk) -> bool:
        """Return whether an earlier call finished a chunk. Count the chunk in that case.

        Raises:
            InputError: The input's rows differ from the rows that the earlier call read.
            StorageError: The input cannot be read.

        """
        shards = complete_shards(self._folder.path, chunk, self._digest)
        if shards is None:
            return False
        if chunk.file in self._doubted:
            self._require_same_records(chunk, shards)
        before = self.done
        self._add_all(chunk, shards)
        self._earlier += self.done - before
        return True

    def add_step(self, chunk: Chunk, step: Step) -> Progress:
        """Count a finished row of a chunk, and return its progress.

        Raises:
            TooManyErrors: More rows have failed than the run allows.

        """
        more = Progress(1, step.error is not None, step.num_bytes, self._share(chunk, 1))
        self._earlier += more if step.is_kept else Progress()
        self._add(more)
        if step.error is not None:
            self._require_few_errors(f"row {step.row}: {step.error}")
        return more

    def add_shards(self, chunk: Chunk, shards: Sequence[ShardInfo]) -> None:
        """Count a finished chunk with its shards.

        Raises:
            TooManyErrors: More rows have failed than the run allows.

        """
        self._add_all(chunk, shards)
        self._require_few_errors(f"rows {chunk.first_row} to {chunk.stop_row - 1}")

    def take_back(self, rows: Progress) -> None:
        """Subtract rows that were counted before their worker died. The chunk of these rows will be repeated."""
        self._add(Progress() - rows)

    def end(self) -> None:
        """Show a share of 1.0. Parts of files outside all rows, such as the end of a tar, thus count as done."""
        self._show(replace(self.done, share=1.0), self._earlier)

    def _require_same_records(self, chunk: Chunk, shards: Sequence[ShardInfo]) -> None:
        source = self._sources[chunk.file]
        with os_errors_as(StorageError, f"{source.name} cannot be read"):
            records = source.records(chunk.start, chunk.stop)
            for shard in shards:
                shard.require_records(records, source.name, str(self._folder))

    def _add_all(self, chunk: Chunk, shards: Sequence[ShardInfo]) -> None:
        for shard in shards:
            share = self._share(chunk, shard.num_rows)
            self._add(Progress(shard.num_rows, shard.num_errors, shard.num_bytes, share))

    def _add(self, more: Progress) -> None:
        self.done += more
        self._show(self._of_limit(self.done), self._of_limit(self._earlier))

    def _share(self, chunk: Chunk, rows: int) -> float:
        """Return the share of `rows` rows of a chunk in the whole input."""
        return self._shares[chunk.file] * (chunk.stop - chunk.start) * rows / chunk.num_rows

    def _of_limit(self, done: Progress) -> Progress:
        """Return `done`. If the number of rows is limited, `share` is at least the finished fraction of this limit."""
        return done if self._limit is None else replace(done, share=max(done.share, done.rows / self._limit))

    def _require_few_errors(self, why: str) -> None:
        if self._max_errors is not None and self.done.errors > self._max_errors:
            raise TooManyErrors(f"{why}. Number of failed rows: {self.done.errors}; the limit is {self._max_errors}")
