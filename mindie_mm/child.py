"""What every worker process begins with: `python -m mindie_mm.child FD LOGS MODULE ARGUMENTS...`.

`ipc.spawn` starts it so; LOGS is the parent's LogSettings as JSON. The lifeline is held before MODULE is imported,
which may take seconds; then its `main` gets the channel, the lifeline and the arguments.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings

import msgspec

from mindie_mm import logs
from mindie_mm.ipc import ChildChannel, Lifeline
from mindie_mm.paths import working_directory
from mindie_mm.standard_streams import use_utf8


def main() -> None:
    """Runs the module's `main`."""
    use_utf8()
    descriptor, log_settings, module, *arguments = sys.argv[1:]
    logs.configure(msgspec.json.decode(log_settings, type=logs.LogSettings), _role(module))
    if not working_directory():
        os.chdir("/")  # torch, for one, cannot be imported where the working directory was removed
    # Ctrl-C and a closed terminal signal the whole foreground group. The parent decides when to stop, and closes the
    # channel.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A client's picture is no news for the log; and round each decoding it would change what other threads see.
    warnings.filterwarnings("ignore", module="PIL")
    with ChildChannel(int(descriptor)) as channel:
        lifeline = Lifeline(channel)
        imported = importlib.import_module(module)
        logs.adopt()
        imported.main(channel, lifeline, *arguments)
        lifeline.end()


def _role(module: str) -> str:
    """`engine` for mindie_mm.engine.process."""
    return module.removesuffix(".process").rpartition(".")[2]


if __name__ == "__main__":
    main()
