"""A sandboxed child of a process that has already imported everything."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindie_mm.lockdown import lock_in


def in_locked_child(do: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Run `do` in a sandboxed child. Return its result and observations about the child, which must succeed."""
    num_threads, modules = len([*Path("/proc/self/task").iterdir()]), {*sys.modules}
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            locks = str(lock_in([writing]))
            result = do()
            noticed = {"threads": num_threads, "locks": locks, "imported late": {*sys.modules} - modules}
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(pickle.dumps((result, noticed)))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    result, noticed = pickle.loads(data)
    return result, noticed
