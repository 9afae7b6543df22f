"""Entry point of every worker process: `python -m mindie_mm.processes.child FD LOGS MODULE ARGUMENTS...`.

`ipc.spawn` starts a worker process with this command. FD is the descriptor of the channel, and LOGS is the parent's
LogSettings as JSON. The lifeline starts before MODULE is imported, because the import may take seconds. Then MODULE's
`main` is called with the channel, the lifeline and the arguments.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence

import msgspec

from mindie_mm import logs
from mindie_mm.processes.ipc import ChildChannel, Lifeline
from mindie_mm.processes.late_modules import import_late
from mindie_mm.processes.standard_streams import use_utf8
from mindie_mm.processes.title import show_title
from mindie_mm.settings.paths import working_directory


def main() -> None:
    """Run the module's `main`."""
    use_utf8()
    descriptor, log_settings, module, *arguments = sys.argv[1:]
    run(int(descriptor), msgspec.json.decode(log_settings, type=logs.LogSettings), module, arguments)


def run(descriptor: int, log_settings: logs.LogSettings, module: str, arguments: Sequence[str]) -> None:
    """Run `module.main` in this process, which serves only as this worker."""
    role = _role(module)
    logs.configure(log_settings, role)
    show_title(f"mindie-mm: {role.replace('_', ' ')}", [module, *arguments])
    if not working_directory():
        os.chdir("/")  # torch cannot be imported in a removed working directory
    # Ctrl-C and a closed terminal send signals to the whole foreground process group. A worker ignores these signals.
    # The parent decides when the worker stops, and then closes the channel.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Warnings about a client's image do not belong in the log. The filter is set once here, because warning filters
    # affect all threads and must not be changed for each image.
    warnings.filterwarnings("ignore", module="PIL")
    with ChildChannel(descriptor) as channel:
        lifeline = Lifeline(channel)
        import_late()
        gc.disable()  # because what an import creates is not garbage, and looking for garbage takes 0.1 s each time
        imported = importlib.import_module(module)
        gc.enable()
        logs.adopt()
        imported.main(channel, lifeline, *arguments)
        lifeline.end()


def _role(module: str) -> str:
    """Return the role of a module, such as `engine` for mindie_mm.engine.process.engine_process."""
    return module.rpartition(".")[2].removesuffix("_process")


if __name__ == "__main__":
    main()
