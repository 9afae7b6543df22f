"""Functions that run in separate processes with the simulated NPU.

The processes are forked from a server that has imported torch_npu, because the import takes seconds. The server itself
opens no device.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.ascend.environment import environment

_LIMIT_S = 300.0


def needs(release: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if torch_npu is older than `release`."""
    try:
        older = Version(version("torch_npu")) < Version(release)
    except PackageNotFoundError:  # tests/ascend/conftest.py skips all tests
        older = True
    return pytest.mark.skipif(older, reason=reason)


needs_registration = needs("2.12.0.post3", "this torch_npu cannot register host memory")


def call(function: Callable[..., Any], *arguments: Any, **settings: str | int) -> Any:
    """Return the result of `function(*arguments)` in a separate process. Raise AssertionError if the function fails."""
    with start(function, *arguments, **settings) as processes:
        return processes[0].result()


def call_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, **settings: str | int) -> list[Any]:
    """Call `function` in `ranks` processes with the variables that torchrun sets, and return all results."""
    with start(function, *arguments, ranks=ranks, **settings) as processes:
        return [process.result() for process in processes]


class Process:
    """A separate process that runs one function."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], variables: dict[str, str]) -> None:
        self._output = tempfile.NamedTemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - `close` closes the file
        self._connection, theirs = _server().Pipe()
        given = (theirs, self._output.name, variables, function, arguments)
        self._process = _server().Process(target=_answer, args=given, daemon=True)
        self._process.start()
        theirs.close()

    def result(self) -> Any:
        reply = None
        with contextlib.suppress(EOFError):
            if self._connection.poll(_LIMIT_S):
                reply = self._connection.recv()
        assert reply is not None, f"no answer\n{self._output.read()}"
        answer, raised = reply
        assert raised is None, f"{raised}\n{self._output.read()}"
        return answer

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it has ended."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=5)
        self.kill()
        self._output.close()


@contextlib.contextmanager
def start(
    function: Callable[..., Any], *arguments: Any, ranks: int | None = None, **settings: str | int
) -> Iterator[list[Process]]:
    """Start one process, or `ranks` processes, that run the function. Kill them at the end of the block."""
    if ranks is None:
        variables = [environment(**settings)]
    else:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
        common = environment(**({"devices": ranks} | settings)) | address
        variables = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    processes: list[Process] = []
    try:
        for one in variables:
            processes.append(Process(function, arguments, one))  # noqa: PERF401 - a failure must close earlier ones
        yield processes
    finally:
        for process in processes:
            process.close()


def traced(path: Path) -> list[str]:
    """Return the calls in a trace, each as "name arguments"."""
    return [line.split(" ", 3)[3] for line in path.read_text(encoding="utf-8").splitlines()]


@cache
def _server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch_npu", "torch.distributed", "pytest"])
    ours = dict(os.environ)
    os.environ.update(environment(OMP_NUM_THREADS=1))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(ours)
    return context


def _answer(
    connection: Connection,
    output: str,
    variables: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        connection.send((function(*arguments), None))
    except BaseException:  # noqa: BLE001 - every error is raised in the calling process
        connection.send((None, traceback.format_exc()))
    with contextlib.suppress(EOFError):
        connection.recv()  # wait until all ranks have answered, because the first rank runs the store that they share
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
