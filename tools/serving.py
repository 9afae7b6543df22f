"""A service in its own process, for the demo, the tests and the benchmarks."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0
_READY = re.compile(r"mindie_mm (?:serves|renders prompts of) (\S+) at (https?://\S+)")


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that is ready for requests."""

    process: subprocess.Popen[str]
    model: str
    url: str
    log: Path
    announcement: str
    """Line that the service printed when it was ready."""

    def get(self, path: str) -> Any:
        """Return the JSON at `path`."""
        with urllib.request.urlopen(self.url + path, timeout=120) as answer:  # noqa: S310 - our own server
            return json.load(answer)

    def shm(self) -> dict[str, Any]:
        """Return the response of /shm, which describes the service's shared memory."""
        state: dict[str, Any] = self.get("/shm")
        return state

    def wait_until_free(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait until no block is in use or the timeout has passed, and return the last result of `shm`."""
        deadline = time.monotonic() + timeout_s
        while (state := self.shm())["blocks"] and time.monotonic() < deadline:
            time.sleep(0.01)
        return state

    def stop(self) -> int:
        """Stop the service and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def running_service(
    settings: Mapping[str, object],
    log: Path,
    model: Path | None = None,
    *,
    start_timeout_s: float = START_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    start: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
    command: str = "serve",
) -> Iterator[RunningService]:
    """Run `mindie-mm serve`, or another command, on a free loopback port, and stop it at exit if it still runs.

    Args:
        settings: Settings of the service by name.
        log: File for the service's log.
        model: Directory of the checkpoint. None is the embedded checkpoint.
        start_timeout_s: Maximum time until the service is ready.
        environment: Variables to add to this process's environment.
        start: Function to call in place of `subprocess.Popen`.
        command: Command of mindie-mm that starts the service.

    Raises:
        RuntimeError: The service is not ready in time. The message ends with the end of the log.

    """
    line = [str(Path(sys.executable).with_name("mindie-mm")), command, *_flags({"port": 0, **settings})]
    if model is not None:
        line.append(str(model))
    with log.open("w", encoding="utf-8") as errors:
        process = start(
            line, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | dict(environment or {})
        )
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], start_timeout_s)
        announcement = process.stdout.readline() if readable else ""
        ready = _READY.search(announcement)
        if ready is None:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
            what = "start" if readable else f"start within {start_timeout_s:g} s"
            raise RuntimeError(f"the service did not {what}:\n{log.read_text(encoding='utf-8')[-2000:]}")
        yield RunningService(process, ready[1], ready[2], log, announcement)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def _flags(settings: Mapping[str, object]) -> list[str]:
    """Return the options of `mindie-mm serve` for `settings`."""
    flags = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        flags.append(f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option}={value}")
    return flags
