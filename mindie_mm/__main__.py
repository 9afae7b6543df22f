"""The program `mindie-mm`, also `python -m mindie_mm`. It handles signals before it imports the commands."""

from __future__ import annotations

import os
import signal
import sys

from mindie_mm.processes.interrupts import end_at_once


def main() -> None:
    """Run the command that the arguments name.

    During the imports, SIGINT ends the process with status 130. `serve` ends with 0, on SIGTERM too, because process 1
    of a container only receives signals that it handles.
    """
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from mindie_mm.cli import main as command  # late: slow to import

    command()


if __name__ == "__main__":
    main()
