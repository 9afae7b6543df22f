"""A service in a process of its own, for the demo, the tests and the benchmarks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOP_TIMEOUT_S = 30.0
_READY = re.compile(r"mindie_mm serves (\S+) at (http://\S+)")


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that takes requests."""

    process: subprocess.Popen[str]
    model: str
    url: str

    def get(self, path: str) -> Any:
        """The JSON behind `path`."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:  # noqa: S310 - our own server
            return json.load(answer)

    def shm(self) -> dict[str, Any]:
        """The shared memory that the service uses: `arenas`, `blocks`, `bytes`."""
        found: dict[str, Any] = self.get("/shm")
        return found

    def wait_until_free(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """`shm()` once no block is in use, or as it is when the time is up."""
        deadline = time.monotonic() + timeout_s
        while (found := self.shm())["blocks"] and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def stop(self) -> int:
        """Asks it to stop and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def running_service(settings: Mapping[str, object], log: Path) -> Iterator[RunningService]:
    """A service on a free loopback port, with `settings` in its environment as MINDIE_MM_<NAME>; its log in `log`.

    Leaving stops it, if it is not stopped already. RuntimeError, with the end of the log, if it does not start.
    """
    variables = {f"MINDIE_MM_{name.upper()}": str(value) for name, value in {"port": 0, **settings}.items()}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "service"],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    try:
        ready = _READY.search(process.stdout.readline())
        if ready is None:
            process.wait(STOP_TIMEOUT_S)
            raise RuntimeError(f"the service did not start:\n{log.read_text()[-2000:]}")
        yield RunningService(process, ready[1], ready[2])
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
