"""Processor time of the processes of a service."""

from __future__ import annotations

import os
import time

import psutil

MODULES = {
    "mindie_mm.tokenize.stage.tokenizer_process": "tokenizer",
    "mindie_mm.engine.process.engine_process": "engine",
    "mindie_mm.decode.nursery": "decoder",  # the nursery and the decoders that it forks
}
OTHER = "service"


def seconds_of(pid: int) -> float:
    """Return the processor time that a process has used, in seconds, with a resolution of nanoseconds.

    The clock of another process is the one that clock_getcpuclockid(3) returns.
    """
    return time.clock_gettime(~pid << 3 | 2)


def tasks(pid: int) -> dict[str, list[int]]:
    """Return the process ids of a process and its descendants, by task."""
    root = psutil.Process(pid)
    pids: dict[str, list[int]] = {}
    for process in [root, *root.children(recursive=True)]:
        words = process.cmdline()
        name = next((name for module, name in MODULES.items() if module in words), OTHER)
        pids.setdefault(name, []).append(process.pid)
    return pids


class ProcessorTime:
    """The processor time of a process and its descendants, by their task: service, tokenizer, decoder or engine.

    This process is the client. It must not be started again, and the others must not change.
    """

    def __init__(self, pid: int) -> None:
        others = {name: [one for one in pids if one != os.getpid()] for name, pids in tasks(pid).items()}
        self._pids = {"client": [os.getpid()], **others}

    def seconds(self) -> dict[str, float]:
        """Return the seconds that each task's processes have used since they started."""
        return {name: sum(map(seconds_of, pids)) for name, pids in self._pids.items()}

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Return the seconds that each task's processes have used since `seconds` returned `before`."""
        return {name: now - before[name] for name, now in self.seconds().items()}
