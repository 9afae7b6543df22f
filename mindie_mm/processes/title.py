"""The command line of a worker process, as ps and top show it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_ENTRY = b"mindie_mm.processes.child"


def show_title(title: str, command: Sequence[str] | None = None) -> None:
    """Show `title` and `command` in this process's command line (proc(5)), as far as there is room.

    The title replaces the interpreter and its options. The descriptor and the settings of the log remain as `ipc.spawn`
    wrote them.

    Args:
        title: Name of the process, such as `mindie-mm: engine 0`.
        command: Module of the worker and its arguments. None keeps what is shown.

    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, stop = map(int, fields[45:47])
    words = ctypes.string_at(start, stop - start).split(b"\0")
    if _ENTRY not in words:
        return
    entry = words.index(_ENTRY)
    kept = words[entry : entry + 3]  # with the descriptor and the settings
    rest = words[entry + 3 :] if command is None else [*map(os.fsencode, command)]
    line = b"\0".join([title.encode(), *kept, *rest])[: stop - start - 1]
    ctypes.memmove(start, line.ljust(stop - start, b"\0"), stop - start)
