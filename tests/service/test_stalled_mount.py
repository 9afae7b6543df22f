"""Tests that files on a stalled mount delay only the requests that read these files."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.service.conftest import SETTINGS, TINY
from tests.service.test_lifetime import post
from tests.watching import wait_until
from tools.serving import RunningService, running_service

pytestmark = pytest.mark.slow

NUM_REQUESTS = 9
NUM_FILES = 4
"""Files per request. All requests together have 36 files. The event loop's default executor has at most 32 threads."""


@pytest.fixture
def mount() -> Iterator[socket.socket]:
    """Yield a listening socket, to which each stalled read connects."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.settimeout(120)
        yield listener


@pytest.fixture
def folder(tmp_path: Path, media_dir: Path) -> Path:
    """Return a media folder. If the name of a file begins with `stalled`, reading this file blocks."""
    folder = tmp_path / "media"
    folder.mkdir()
    stalled = [f"stalled-{request}-{number}.jpg" for request in range(NUM_REQUESTS) for number in range(NUM_FILES)]
    for name in ("fine.jpg", *stalled):
        shutil.copy(media_dir / "green_star.jpg", folder / name)
    return folder


@pytest.fixture
def stalling(tmp_path: Path, folder: Path, mount: socket.socket) -> Iterator[RunningService]:
    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-m", "tests.stalled_mount", *command[1:]], **options)

    settings = SETTINGS | {"spool": tmp_path / "spool", "allowed_media_dir": folder}
    port = {"STALL_PORT": str(mount.getsockname()[1])}
    with running_service(settings, tmp_path / "log", TINY, start=start, environment=port) as running:
        yield running


def test_reads_that_stall_do_not_block_other_requests_or_the_stop(
    stalling: RunningService, mount: socket.socket, folder: Path, tmp_path: Path, red_square: str
) -> None:
    """The service answers other requests and probes, ends a request whose client has left, and stops in time."""

    def spooled() -> int:
        return len(list((tmp_path / "spool").iterdir()))

    def stall(request: int) -> socket.socket:
        files = [str(folder / f"stalled-{request}-{number}.jpg") for number in range(NUM_FILES)]
        return post(stalling, "/tokenize", {"inputs": [{"image": file} for file in files]})

    with ExitStack() as stack, httpx2.Client(base_url=stalling.url, timeout=300) as http:
        waiting = [stack.enter_context(stall(request)) for request in range(NUM_REQUESTS)]
        for _ in range(NUM_REQUESTS * NUM_FILES):
            stack.enter_context(mount.accept()[0])
        assert spooled() == NUM_REQUESTS
        for path in ("/health", "/metrics", "/shm"):
            assert http.get(path).status_code == 200, path
        for image in (red_square, str(folder / "fine.jpg")):
            assert http.post("/tokenize", json={"inputs": [{"image": image}]}).status_code == 200
        waiting[0].close()
        wait_until(lambda: spooled() == NUM_REQUESTS - 1)
        assert stalling.stop() == 0
        answer = stack.enter_context(waiting[1].makefile("rb")).read()
        assert b"the service stopped before the request was finished" in answer
        assert not spooled()
    assert "Traceback" not in stalling.log.read_text()
