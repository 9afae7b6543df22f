"""A worker that reports its state. A fork server may import it and call `prepare`."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from pathlib import Path

import msgspec

from mindie_mm.processes.forking import start_spare
from mindie_mm.processes.ipc import ChildChannel, Lifeline

prepared_in: int | None = None
"""Id of the fork server, if this process is one or is a copy of one."""


class State(msgspec.Struct, frozen=True, tag="state"):
    pid: int
    parent: int
    prepared_in: int | None
    arguments: list[bytes]
    environment: dict[bytes, bytes]
    folder: str
    descriptors: dict[int, str]
    num_threads: int
    drawn: float
    """A number from the generator of `random`."""
    collects_garbage: bool

    @classmethod
    def now(cls, arguments: list[str]) -> State:
        """Return the state of this process."""
        opened = [*Path("/proc/self/fd").iterdir()]
        descriptors = {int(path.name): str(path.readlink()) for path in opened if path.is_symlink()}
        return cls(
            os.getpid(),
            os.getppid(),
            prepared_in,
            [os.fsencode(argument) for argument in arguments],
            dict(os.environb),
            str(Path.cwd()),
            descriptors,
            threading.active_count(),
            random.random(),
            gc.isenabled(),
        )


def prepare(how: str) -> list[str]:
    """Do what a fork server does before it is ready."""
    global prepared_in  # noqa: PLW0603 - copies inherit it
    prepared_in = os.getpid()
    os.environ["SET_BY_AN_IMPORT"] = "yes"
    if how == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if how == "fails":
        raise RuntimeError(how)
    return ["cpu"]


def main(channel: ChildChannel, lifeline: Lifeline, *arguments: str) -> None:
    """Report the state, and obey until the channel is closed. With the argument `spare`, start another worker."""
    channel.send(msgspec.msgpack.encode(State.now([*arguments])))
    while True:
        try:
            order = channel.recv()
        except EOFError:
            return
        if order == b"exit":
            sys.exit(7)
        if order == b"raise":
            raise RuntimeError
        if order == b"print":
            print("printed")
            sys.stdout.flush()
            channel.send(b"printed")
        if order == b"start":
            _start_another(channel)


def _start_another(channel: ChildChannel) -> None:
    """Start a worker of this worker, and report its state."""
    import asyncio

    async def start() -> None:
        child = await start_spare(__name__, "inner", environment={**os.environ, "INNER": "yes"})
        channel.send(await child.channel.recv())
        await child.close()

    asyncio.run(start())
