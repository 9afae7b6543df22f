"""An image that makes a worker wait while the test changes something."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from tests.media_samples import encoded, photograph


class Gate(threading.Thread):
    """A named pipe in place of an image. A worker that opens the pipe gets the image after a call to `act`."""

    def __init__(self, path: Path, act: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        os.mkfifo(path)
        self._path, self._act = path, act
        self.start()

    def run(self) -> None:
        # `open` returns as soon as a worker opens the pipe. `act` may kill the worker.
        with contextlib.suppress(BrokenPipeError), self._path.open("wb") as file:
            self._act()
            file.write(encoded(photograph(size=(80, 60))))

    def close(self) -> None:
        """Wait for the thread, and replace the pipe with the image."""
        self.join(300)
        assert not self.is_alive()
        self._path.unlink()
        self._path.write_bytes(encoded(photograph(size=(80, 60))))
