"""The program `mindie-mm` and `python -m mindie_mm`. It sets signal handlers before it imports the commands."""

from __future__ import annotations

import os
import signal
import sys

from mindie_mm.processes.interrupts import end_at_once


def main() -> None:
    """Run the command that the arguments specify.

    While the commands are imported, SIGINT exits the process with status 130. For `serve`, SIGINT and SIGTERM exit the
    process with status 0. Without a handler, process 1 of a container would not receive these signals.
    """
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from mindie_mm.cli import main as command  # late, because the import is slow

    command()


if __name__ == "__main__":
    main()
