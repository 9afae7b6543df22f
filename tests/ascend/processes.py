"""Functions called in processes of their own, which see the simulated NPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.ascend.environment import environment

_LIMIT_S = 100.0


def call(function: Callable[..., Any], *arguments: Any, **settings: str | int) -> Any:
    """What `function(*arguments)` returns in another process, as JSON has it. AssertionError with what it raised."""
    with start(function, *arguments, **settings) as processes:
        return processes[0].result()


def call_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, **settings: str | int) -> list[Any]:
    """What each of `ranks` processes returns, as torchrun would start them."""
    with start(function, *arguments, ranks=ranks, **settings) as processes:
        return [process.result() for process in processes]


class Process:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], variables: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        called = json.dumps([function.__module__, function.__name__, *arguments])
        command = [sys.executable, "-m", "tests.ascend.processes", called]
        self.popen = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=self._output, text=True)

    def result(self) -> Any:
        answer, _ = self.popen.communicate(timeout=_LIMIT_S)
        self._output.seek(0)
        assert self.popen.returncode == 0, f"exit {self.popen.returncode}\n{self._output.read()}"
        return json.loads(answer.splitlines()[-1])

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()
        self._output.close()


@contextlib.contextmanager
def start(
    function: Callable[..., Any], *arguments: Any, ranks: int | None = None, **settings: str | int
) -> Iterator[list[Process]]:
    """Processes that call the function, one or as many as `ranks`; they are gone when the block is left."""
    if ranks is None:
        variables = [environment(**settings)]
    else:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
        common = environment(**({"devices": ranks} | settings)) | address
        variables = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    processes: list[Process] = []
    try:
        processes += [Process(function, arguments, one | {"OMP_NUM_THREADS": "1"}) for one in variables]
        yield processes
    finally:
        for process in processes:
            process.close()


def traced(path: Path) -> list[str]:
    """The calls in a trace, without their times: "name arguments"."""
    return [line.split(" ", 3)[3] for line in path.read_text().splitlines()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    module, name, *given = json.loads(sys.argv[1])
    print(json.dumps(getattr(importlib.import_module(module), name)(*given)), flush=True)
