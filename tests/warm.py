"""Commands of mindie-mm whose processes are forked from a process that has already imported all modules.

To the kernel and to observers, these copies look like processes that a shell has started. This applies to their pids,
parents, command lines, descriptors, signal handlers and exit statuses.

A copy saves the time to start an interpreter and import modules, which is fifteen seconds for the three processes of a
service. Tests for the startup itself use `tools.serving` and subprocess.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

import pytest
import torch

from mindie_mm import cli
from mindie_mm.processes import ipc
from tools import serving

_PRELOADED = (
    __name__,
    "mindie_mm.batch.batch_process",
    "mindie_mm.cli.serve",
    "mindie_mm.decode.nursery",
    "mindie_mm.worker.llm",
    "mindie_mm.engine.process.engine_process",
    "mindie_mm.tokenize.stage.tokenizer_process",
    "service.server",
    "transformers.modeling_layers",
    "transformers.models.auto.tokenization_auto",
    "tests.pristine",
)
"""Modules that the fork server imports."""
_FIRST_KEPT = 512
"""Lowest number of the temporary descriptors that keep a copy's files open across the fork."""
_ON_SIMULATED_NPU = "ASCEND_HOME_PATH" in os.environ
"""True on the simulated NPU. There, tests/ascend/processes.py already uses the one fork server of the process."""
START_METHOD = "spawn" if _ON_SIMULATED_NPU else "forkserver"
"""Start method of multiprocessing for a new process that shares no state with pytest."""
_CONTEXT = multiprocessing.get_context("forkserver")
if not _ON_SIMULATED_NPU:
    _CONTEXT.set_forkserver_preload(list(_PRELOADED))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the fork server of a parallel process early, so that it imports modules while the first tests run."""
    if hasattr(session.config, "workerinput") and not _ON_SIMULATED_NPU:
        forkserver.ensure_running()


class Popen:
    """A running command of mindie-mm, with the part of the interface of subprocess.Popen that tests use."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int | IO[Any],
        stderr: IO[Any],
        stdin: int | None = None,
        text: bool = True,
        env: Mapping[str, str] | None = None,
        closed: Collection[str] = (),
        max_open_files: int | None = None,
    ) -> None:
        """Start a command.

        `stdin` is the descriptor of the command's standard input, or None for /dev/null. `closed` contains the names of
        the standard streams that are closed when the command starts. `max_open_files` is the command's soft limit of
        open descriptors.
        """
        assert text
        self.stdout: IO[str] | None = None
        if isinstance(stdout, int):
            assert stdout == subprocess.PIPE
            read, write = os.pipe()
            self.stdout = os.fdopen(read)
        else:
            write = os.dup(stdout.fileno())
        given = os.dup(stdin) if stdin is not None else os.open(os.devnull, os.O_RDONLY)
        with (
            Connection(given) as source,
            Connection(write, readable=False) as out,
            Connection(os.dup(stderr.fileno()), readable=False) as errors,
        ):
            environment = dict(os.environ if env is None else env)
            arguments = (list(map(str, command)), source, out, errors, environment, Path.cwd(), closed, max_open_files)
            self._process = _CONTEXT.Process(target=_begin, args=arguments, daemon=True)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("mindie-mm", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the process has ended, and its status has not arrived yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


running_service = serving.running_service if _ON_SIMULATED_NPU else partial(serving.running_service, start=Popen)


def run(
    command: Sequence[object], *, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end, and return its status and output."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
    ):
        process = Popen(list(map(str, command)), stdout=out, stderr=errors, env=env)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), errors.read())


def _begin(
    command: list[str],
    source: Connection,
    out: Connection,
    errors: Connection,
    environment: dict[str, str],
    folder: Path,
    closed: Collection[str],
    max_open_files: int | None,
) -> None:
    """Run `command` in a copy that the fork server has just started."""
    gc.freeze()  # else the first collection would write to, and thereby copy, the pages of all imported modules
    if max_open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.dup2(source.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    source.close()
    out.close()
    errors.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - stays open
    _open_streams()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    named = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    stubs = [entry for entry in sys.path if entry.endswith("stubs")]  # only the pytest process uses the stubs
    sys.path[:] = [*named, *(entry for entry in sys.path if entry not in {*named, *stubs})]
    ipc.subprocess = SUBPROCESS  # type: ignore[assignment]
    sys.argv = command
    _show([sys.executable, *command])
    for name in closed:
        os.close(("stdin", "stdout", "stderr").index(name))
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
    cli.main(command[1:], prog_name="mindie-mm")


def _open_streams() -> None:
    """Open sys.stdout and sys.stderr again, because descriptors 1 and 2 refer to different files after the fork."""
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115


def own_modules() -> dict[str, ModuleType]:
    """Return the package's modules that are in use."""
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "mindie_mm"}


def replace_own_modules(modules: Mapping[str, ModuleType]) -> None:
    """Use `modules` as the package's modules."""
    for name in own_modules():
        del sys.modules[name]
    sys.modules.update(modules)


class _Copy(subprocess.Popen[bytes]):
    """A worker that is forked from this process, but has only the open descriptors of a newly started worker."""

    def __init__(
        self, command: list[str], pass_fds: tuple[int, ...], env: Mapping[str, str] | None = None, **nowhere: int
    ) -> None:
        """Start a copy.

        `nowhere` contains the standard streams to redirect to /dev/null. It is ignored: the copy inherits the streams
        of this process.
        """
        self._descriptors = pass_fds
        self._environment = env
        super().__init__(command)

    def __del__(self) -> None:
        self.poll()  # reaps an ended process, so that subprocess does not report it as running
        super().__del__()

    def _execute_child(self, command: list[str], *_: Any) -> None:
        with warnings.catch_warnings():
            # Python warns that other threads may hold locks. A worker needs none of these locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            # The worker's descriptors move to high numbers before the fork, because the low numbers are not safe. ipc
            # closes its own descriptors in every forked process. If this process has used libuv, libuv in the copy
            # closes the two low descriptors of its former pipe and opens a new pipe.
            kept = {number: fcntl.fcntl(number, fcntl.F_DUPFD, _FIRST_KEPT) for number in self._descriptors}
            self.pid = os.fork()
        if self.pid:
            for copy in kept.values():
                os.close(copy)
        else:
            for number, copy in kept.items():
                os.dup2(copy, number)
            _end(partial(self._run, command))
        self._child_created = True

    def _run(self, command: list[str]) -> None:
        gc.freeze()  # else a collected object could close a descriptor number that another file now uses
        torch.set_num_threads(1)  # renews the thread pool before two threads could race to renew it
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for start, stop in pairwise([2, *sorted(self._descriptors), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(start + 1, stop)
        _open_streams()
        loggers = [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
        # Keep the handlers alive, because a handler that is garbage-collected would close its file.
        self._handlers = [logger.handlers[:] for logger in loggers]
        logging.root.handlers.clear()
        prepared = sys.modules.get("tests.pristine")
        # Without modules that are prepared, the worker imports its own.
        replace_own_modules(prepared.UNUSED.pop() if prepared and prepared.UNUSED else {})
        if self._environment is not None:
            os.environ.clear()
            os.environ.update(self._environment)
        importlib.import_module("mindie_mm.processes.ipc").subprocess = SUBPROCESS  # type: ignore[attr-defined]
        _show(command)
        sys.argv = command[command.index("-m") + 1 :]
        importlib.import_module(sys.argv[0]).main()


SUBPROCESS = SimpleNamespace(Popen=_Copy, DEVNULL=subprocess.DEVNULL)
"""Replacement for `subprocess` in mindie_mm.processes.ipc that starts workers as copies of this process."""


@pytest.fixture(scope="module")
def copied_workers() -> Iterator[None]:
    """Start the workers of a module's tests and fixtures as copies of the pytest process."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.get_num_threads() == 1:  # a copy lacks the threads of a used thread pool, and would hang
            importlib.import_module("tests.pristine")
            patch.setattr(ipc, "subprocess", SUBPROCESS)
        yield


def _end(run: Callable[[], None]) -> NoReturn:
    """Call `run`, and end this process with the exit status that the interpreter would give it."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - as the interpreter itself
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _show(arguments: Sequence[str]) -> None:
    """Overwrite this process's command line in memory (see proc(5)) with as much of `arguments` as fits."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"".join(argument.encode() + b"\0" for argument in arguments)[: end - start - 1]
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(line.ljust(end - start, b"\0"))
