"""What travels between a run and its workers, as msgpack."""

from __future__ import annotations

import msgspec

from mindie_mm.batch.input.source import Chunk
from mindie_mm.batch.output.shard import ShardInfo
from mindie_mm.processes.ipc import Failure


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Run to worker."""

    chunk: Chunk
    doomed: dict[int, str] = {}
    """Rows not to be tried, with their errors: each of them ended a worker twice."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to run, once: the checkpoint is read."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A row is done."""

    row: int
    num_bytes: int
    """That its blocks take."""
    error: str | None = None


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Rows are done, since the last time that this was told."""

    steps: list[Step]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A chunk is done: its shards have their names."""

    chunk: int
    shards: list[ShardInfo]


Report = Ready | Steps | Finished | Failure
"""A Failure: the run cannot go on."""


def death_error(how: str) -> str:
    """The error of a row at which two workers died."""
    return f"ProcessDied: the worker ended with {how} at this row, twice"
