"""One rank of an engine, started by `launcher.py`.

Usage: `python -m mindie_mm.engine.process.rank DOOR LOGS NUMBER DEVICE THREADS`

As `mindie_mm.processes.child`, it holds its lifelines before it imports what takes seconds.
"""

from __future__ import annotations

import signal
import socket
import sys

import msgspec

from mindie_mm import logs
from mindie_mm.processes.ipc import ChildChannel, Lifeline
from mindie_mm.processes.standard_streams import use_utf8


def main() -> None:
    """Serve until the parent closes the channel, or until the parent, the launcher or another rank dies."""
    use_utf8()
    door, log_settings, number, device, num_threads = sys.argv[1:]
    logs.configure(msgspec.json.decode(log_settings, type=logs.LogSettings), f"engine.{number}")
    for ignored in (signal.SIGINT, signal.SIGHUP):  # sent by the terminal, but the parent decides when to stop
        signal.signal(ignored, signal.SIG_IGN)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{door}")
        _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
    except (ConnectionError, ValueError):  # the launcher has ended, as it was told to
        sys.exit(1)
    with ChildChannel(descriptor) as channel, ChildChannel(connection.detach()) as launcher:
        lifeline = Lifeline(channel, launcher)
        from mindie_mm.engine.process import engine_process as process
        from mindie_mm.engine.ranks import join

        logs.adopt()
        process.main(channel, lifeline, join(int(number), device, int(num_threads)))
        lifeline.end()


if __name__ == "__main__":
    main()
