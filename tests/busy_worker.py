"""A worker that never looks at its channel, for tests of what ends one."""

import threading
from pathlib import Path

from mindie_mm.processes.ipc import ChildChannel, Lifeline


def main(channel: ChildChannel, lifeline: Lifeline, path: str) -> None:
    """Makes a file at `path`, says so, and is busy for ever."""
    lifeline.hold(lambda: Path(path).touch(), lambda _: Path(path).unlink())
    channel.send(b"made")
    threading.Event().wait()
