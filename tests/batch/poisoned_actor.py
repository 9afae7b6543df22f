"""A Ray actor that dies at one row. It has a module of its own, because the nodes of the cluster import the module."""

from __future__ import annotations

import os
import signal

from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.processes.ipc import Failure
from mindie_mm.worker.answer_file import Line
from mindie_mm.worker.rows_on_ray import _Actor

POISON = 5
"""Number of the row."""


class PoisonedActor(_Actor):
    """An actor that dies when it gets the row `POISON`."""

    async def answer(self, record: ShardRow) -> Line | Failure:
        if record.row == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().answer(record)
