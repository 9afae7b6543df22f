"""A worker that reports that it is ready, reports a failure, or exits without a report."""

from __future__ import annotations

import sys

import msgspec

from mindie_mm.errors import ArenaFull
from mindie_mm.processes.ipc import ChildChannel, Failure, Lifeline


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    answer: int


def main(channel: ChildChannel, lifeline: Lifeline, how: str) -> None:
    if how == "ends":
        sys.exit(3)
    channel.send(msgspec.msgpack.encode(Begun(42) if how == "begins" else Failure.of(ArenaFull("no room"))))
