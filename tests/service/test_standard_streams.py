"""Tests for a service whose standard streams are closed or are not read."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx2
import psutil
import pytest

from tests import warm
from tests.cli.shell import BIN
from tests.watching import wait_until
from tools.serving import running_service


@contextmanager
def serving(settings: dict[str, object], stderr: IO[str], **given: Any) -> Iterator[tuple[warm.Popen, str]]:
    """Start a service, wait until it is ready, and yield its process and URL."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    process = warm.Popen(
        [str(BIN), "serve", "--port=0", *flags],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **given,
    )
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], 90)[0], "it is not ready"
        yield process, process.stdout.readline().partition(" at ")[2].split()[0]
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.slow
def test_an_unread_log_pipe_does_not_block_the_service(settings: dict[str, object], tmp_path: Path) -> None:
    """The service starts, answers and stops although its processes log more than fits into the pipe."""
    read, write = os.pipe()
    size = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    given = settings | {"spool": tmp_path / "spool", "log_level": "debug"}
    with os.fdopen(read, "rb"), os.fdopen(write, "w") as errors, serving(given, errors) as (process, url):
        for number in range(60):
            assert httpx2.get(f"{url}/nothing-{number}").status_code == 404
        (engine,) = [
            child
            for child in psutil.Process(process.pid).children()
            if "mindie_mm.engine.process.engine_process" in child.cmdline()
        ]
        engine.kill()  # the restarted engine must also start although it cannot log
        body = {"prompt": "What?", "max_tokens": 1}
        wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        assert httpx2.get(f"{url}/health/live").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == size
        assert select.select([], [write], [], 0)[1] == [], "the pipe is still full"


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(("stdin",), marks=pytest.mark.slow),
        pytest.param(("stderr",), marks=pytest.mark.slow),
        ("stdin", "stderr"),
    ],
    ids="-".join,
)
@pytest.mark.slow
def test_a_service_started_without_standard_streams_opens_no_socket_there(
    settings: dict[str, object], tmp_path: Path, closed: tuple[str, ...]
) -> None:
    """A socket must not get a descriptor from 0 to 2.

    Libraries would print to such a socket, and libuv refuses to close it.
    """
    with (
        (tmp_path / "log").open("w") as errors,
        serving(settings | {"spool": tmp_path / "spool"}, errors, closed=closed) as (process, url),
    ):
        for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children()):
            opened = [str(Path(f"/proc/{one.pid}/fd/{number}").readlink()) for number in range(3)]
            assert not [path for path in opened if path.startswith("socket:")]
        body = {"prompt": "What?", "max_tokens": 1}
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_closing_the_terminal_stops_the_service_like_sigterm(settings: dict[str, object], tmp_path: Path) -> None:
    """The service finishes running requests.

    The kernel sends SIGHUP to the whole foreground process group, but only the service's main process reacts.
    """
    terminal, other_end = os.openpty()
    start: Callable[..., Any] = partial(
        subprocess.Popen,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(other_end, termios.TIOCSCTTY, 0),
    )
    given = settings | {"spool": tmp_path / "spool", "grace_s": 600}
    with (
        running_service(given, tmp_path / "log", start=start) as running,
        httpx2.Client(base_url=running.url, timeout=300) as http,
    ):
        os.close(other_end)
        body = {"prompt": "What?", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.close(terminal)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.process.wait(30) == 0
    assert "stopping; running requests: 1, " in (tmp_path / "log").read_text()
