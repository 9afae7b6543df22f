"""Messages between a run and its workers, as msgpack."""

from __future__ import annotations

import msgspec

from mindie_mm.batch.input.source import Chunk
from mindie_mm.batch.output.shard import ShardInfo
from mindie_mm.processes.ipc import Failure

SANDBOX = "sandbox"
"""Argument of a worker that decodes media in a sandboxed process."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Message to a worker: process a chunk."""

    chunk: Chunk
    doomed: dict[int, str] = {}
    """Number and error message of each row that must not be tried, because two workers died at this row."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First message from a worker: it has read the checkpoint."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A finished row."""

    row: int
    num_bytes: int
    """Size of the row's arrays in bytes."""
    error: str | None = None
    is_kept: bool = False
    """True if an earlier call has finished the row."""


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Message from a worker: the rows that it finished since its last report."""

    steps: list[Step]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Message from a worker: a chunk is finished, and its shards have their final names."""

    chunk: int
    shards: list[ShardInfo]


Report = Ready | Steps | Finished | Failure
"""Messages from a worker. A Failure means that the run cannot continue."""
