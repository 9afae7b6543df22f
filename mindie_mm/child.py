"""What every worker process begins with: `python -m mindie_mm.child FD MODULE ARGUMENTS...`, as `ipc.spawn` starts it.

The lifeline is held before MODULE is imported, which may take seconds; then its `main` gets the channel, the
lifeline and the arguments.
"""

from __future__ import annotations

import importlib
import signal
import sys

from mindie_mm.ipc import ChildChannel, Lifeline


def main() -> None:
    """Runs the module's `main`."""
    descriptor, module, *arguments = sys.argv[1:]
    # Ctrl-C reaches the whole foreground group; the parent decides when to stop, and closes the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ChildChannel(int(descriptor)) as channel:
        lifeline = Lifeline(channel)
        importlib.import_module(module).main(channel, lifeline, *arguments)
        lifeline.end()


if __name__ == "__main__":
    main()
