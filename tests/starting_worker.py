"""A worker that reports that it is ready, reports a failure, or exits without a report."""

from __future__ import annotations

import sys

import msgspec

from mindie_mm.errors import ArenaFull
from mindie_mm.processes.ipc import ChildChannel, Failure, Lifeline, Loading


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    answer: int


def main(channel: ChildChannel, lifeline: Lifeline, how: str) -> None:
    if how == "ends":
        sys.exit(3)
    for share in (0.25, 0.5):
        channel.send(msgspec.msgpack.encode(Loading(share)))
    channel.send(msgspec.msgpack.encode(Begun(42) if how == "begins" else Failure.of(ArenaFull("no room"))))
