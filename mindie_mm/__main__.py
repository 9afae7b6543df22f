"""The program mindie-mm, and `python -m mindie_mm`: handle signals first, then import the commands."""

from __future__ import annotations

import os
import signal
import sys

from mindie_mm.interrupts import end_at_once


def main() -> None:
    """Run the command that the arguments name.

    While it imports, SIGINT ends the process with status 130. `serve` ends with 0, on SIGTERM too: as process 1 of a
    container it would otherwise never get a signal that it has no handler for.
    """
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from mindie_mm.cli import main as command  # late: imports take time, in which signals come

    command()


if __name__ == "__main__":
    main()
