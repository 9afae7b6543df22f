"""Messages between a run and its workers, as msgpack."""

from __future__ import annotations

import msgspec

from mindie_mm.batch.input.source import Chunk
from mindie_mm.batch.output.shard import ShardInfo
from mindie_mm.processes.ipc import Failure


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Run to worker: do a chunk."""

    chunk: Chunk
    doomed: dict[int, str] = {}
    """Errors of the rows that must not be tried, by row. Each of these rows ended a worker twice."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to run, once: the checkpoint has been read."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A finished row."""

    row: int
    num_bytes: int
    """Size of its blocks in bytes."""
    error: str | None = None


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Worker to run: rows that were finished since the last report."""

    steps: list[Step]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Worker to run: a chunk is finished, and its shards have their names."""

    chunk: int
    shards: list[ShardInfo]


Report = Ready | Steps | Finished | Failure
"""Messages from a worker. A Failure means that the run cannot continue."""


def death_error(how: str) -> str:
    """Return the error of a row at which two workers died."""
    return f"ProcessDied: the worker exited twice with {how} at this row"
