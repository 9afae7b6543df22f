"""Files that the service reads again when they change: API keys and certificates."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from mindie_mm.processes.restarts import logged

INTERVAL_S = 2.0
"""Time in seconds between two looks at the files. File systems of containers do not report all changes by inotify."""


class WatchedFiles:
    """Files whose changes are noticed from the creation of this object on. Create it before the files are read."""

    def __init__(self, files: Sequence[Path | None]) -> None:
        self._files = [file for file in files if file is not None]
        self._seen = self._states()

    async def watch(self, reload: Callable[[], object]) -> None:
        """Call `reload` when the files have changed, until canceled. If `reload` fails, log the error and go on.

        A file that is missing is about to be replaced. The change counts when the file is there again.
        """
        while self._files:
            await asyncio.sleep(INTERVAL_S)
            found = await asyncio.to_thread(self._states)
            if found == self._seen or None in found:
                continue
            self._seen = found
            with logged(f"{' and '.join(map(str, self._files))} cannot be used, so the earlier contents stay in use"):
                reload()

    def _states(self) -> list[tuple[int, ...] | None]:
        return list(map(_state, self._files))


def _state(file: Path) -> tuple[int, ...] | None:
    """Return numbers that differ after a change of the file, or None if there is no file."""
    try:
        status = os.stat(file)  # noqa: PTH116 - follows links, as Kubernetes replaces a Secret by changing a link
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
