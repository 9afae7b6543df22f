"""A worker that logs, and that uses a library with its own log handler."""

from __future__ import annotations

import logging

from mindie_mm.processes.ipc import ChildChannel, Lifeline

logging.getLogger("library").addHandler(logging.StreamHandler())
logging.getLogger("library").propagate = False


def main(channel: ChildChannel, _: Lifeline) -> None:
    """Log some records, report that they are logged, and wait until the channel is closed."""
    logging.getLogger("mindie_mm.worker").debug("something of ours")
    logging.getLogger("library").warning("something of a library's")
    logging.getLogger("library").debug("what nobody asked for")
    channel.send(b"logged")
    try:
        channel.recv()
    except EOFError:
        return
