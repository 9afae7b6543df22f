"""The folders in the spool that contain the media of running requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from secrets import token_hex

from mindie_mm.errors import SharedMemoryError
from mindie_mm.shm import RequestDirectory, request_directory

_log = logging.getLogger(__name__)

PLANS = "plans-"
"""Beginning of the names of the folders for plans."""


@contextmanager
def spool_directory(spool: Path, name: str | None = None) -> Iterator[RequestDirectory]:
    """Open a `request_directory`. If it cannot be removed, only log the error, which does not affect the answer."""
    with ExitStack() as stack:
        directory = stack.enter_context(request_directory(spool, name))
        try:
            yield directory
        finally:
            try:
                stack.close()
            except SharedMemoryError as error:
                _log.error("%s; it is removed at the next reclaim", error)


class PlanFolder:
    """The folder for the media of all requests that are planned without preprocessing.

    These requests allocate no shared memory, so they need no path file. A directory for each of them would take longer
    to create and to remove than the plan takes. If the service dies, the folder is reclaimed like the directory of a
    request.
    """

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._folders = ExitStack()
        self._current: RequestDirectory | None = None
        self._numbers = count(1)

    def place(self) -> tuple[Path, str]:
        """Return the folder, and the beginning of the names of a new request's files in it.

        The folder is created for the first request, and again if a program that cleans up temporary files has removed
        its path file. Raise SharedMemoryError if it cannot be created.
        """
        if self._current is None or not self._current.path_file.exists():
            name = f"{PLANS}{token_hex(8)}"
            self._current = self._folders.enter_context(spool_directory(self._spool, name))
        return self._current.path, f"{next(self._numbers)}-"

    def close(self) -> None:
        """Remove the folder. Call this method when no request is running."""
        self._folders.close()
