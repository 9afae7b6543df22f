"""An image that kills the worker that reads it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path

import psutil

from tests.media_samples import encoded, photograph


class Deadly:
    """A named pipe in place of an image, whose first `deaths` readers are killed.

    If `deaths` is less than two, the next reader gets an image.
    """

    def __init__(self, path: Path, deaths: int, spawned: list[int] | None = None) -> None:
        """Create the pipe.

        `spawned` is a list to which the test adds the pids of workers. By default, workers are recognized by their
        command line.
        """
        os.mkfifo(path)
        self._path, self._deaths, self._spawned = path, deaths, spawned
        self.alone: list[bool] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for _ in range(self._deaths):
            with self._path.open("wb"):  # returns as soon as a worker opens the pipe
                while not (readers := [pid for pid in psutil.pids() if pid != os.getpid() and self._reads(pid)]):
                    time.sleep(0.001)  # the worker's call to open returns after this process's call
                self.alone.append(len(self._workers()) == 1)
                os.kill(readers[0], signal.SIGKILL)
            while self._is_open():
                time.sleep(0.001)  # else a dying reader could receive the next reader's image
        if self._deaths < 2:
            with self._path.open("wb") as file:
                file.write(encoded(photograph(size=(80, 60))))

    def _is_open(self) -> bool:
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return False
        return True

    def _workers(self) -> list[int]:
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE and self._is_worker(child):
                    found.append(child.pid)
        return found

    def _is_worker(self, child: psutil.Process) -> bool:
        if self._spawned is None:
            return "mindie_mm.batch.batch_process" in child.cmdline()
        return child.pid in self._spawned

    def _reads(self, pid: int) -> bool:
        try:
            return any(link.readlink() == self._path for link in Path(f"/proc/{pid}/fd").iterdir())
        except (FileNotFoundError, PermissionError):  # the process is gone or exiting
            return False

    def join(self) -> None:
        self._thread.join(300)
        assert not self._thread.is_alive()
