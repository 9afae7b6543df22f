"""A service in a process of its own, for the demo, the tests and the benchmarks."""

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
_READY = re.compile(r"mindie_mm serves (\S+) at (http://\S+)")


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that takes requests."""

    process: subprocess.Popen[str]
    model: str
    url: str
    log: Path

    def get(self, path: str) -> Any:
        """The JSON behind `path`."""
        with urllib.request.urlopen(self.url + path, timeout=120) as answer:  # noqa: S310 - our own server
            return json.load(answer)

    def shm(self) -> dict[str, Any]:
        """The shared memory that the service uses: `arenas`, `blocks`, `bytes`."""
        found: dict[str, Any] = self.get("/shm")
        return found

    def wait_until_free(self, timeout_s: float = 120.0) -> dict[str, Any]:
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
def running_service(
    settings: Mapping[str, object],
    log: Path,
    model: Path | None = None,
    *,
    start_timeout_s: float = START_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    start: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
) -> Iterator[RunningService]:
    """`mindie-mm serve` on a free loopback port, with `settings` as its flags and its log in `log`.

    `model` is the checkpoint's directory; None is the embedded one. `environment` is added to ours. `start` is called
    as subprocess.Popen. Leaving stops the service, if it is not stopped already. RuntimeError, with the end of the log,
    if it is not ready within `start_timeout_s` seconds.
    """
    command = [str(Path(sys.executable).with_name("mindie-mm")), "serve", *_flags({"port": 0, **settings})]
    if model is not None:
        command.append(str(model))
    with log.open("w", encoding="utf-8") as errors:
        process = start(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | dict(environment or {})
        )
    assert process.stdout is not None
    try:
        said, _, _ = select.select([process.stdout], [], [], start_timeout_s)
        ready = _READY.search(process.stdout.readline()) if said else None
        if ready is None:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
            what = "start" if said else f"start within {start_timeout_s:g} s"
            raise RuntimeError(f"the service did not {what}:\n{log.read_text(encoding='utf-8')[-2000:]}")
        yield RunningService(process, ready[1], ready[2], log)
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
    """The options of `mindie-mm serve` for settings by their names."""
    flags = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        flags.append(f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option}={value}")
    return flags
