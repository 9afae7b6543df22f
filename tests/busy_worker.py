"""A worker that never reads its channel, to test how workers end."""

import threading
from pathlib import Path

from mindie_mm.processes.ipc import ChildChannel, Lifeline


def main(channel: ChildChannel, lifeline: Lifeline, path: str) -> None:
    """Create a file at `path`, report that it exists, and wait forever."""
    lifeline.hold(lambda: Path(path).touch(), lambda _: Path(path).unlink())
    channel.send(b"made")
    threading.Event().wait()
