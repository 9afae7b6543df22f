"""Fixtures of every test."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mindie_mm import ipc
from mindie_mm.device import open_device
from mindie_mm.errors import DeviceError
from mindie_mm.shm import survey
from mindie_mm.shm.layout import SHM_DIRECTORY

pytest_plugins = ["tests.ascend.waits", "tests.checkpoints", "tests.recording", "tests.warm"]
# What these assert is shown with its values, as in test modules.
pytest.register_assert_rewrite("tests.models.contract", "tests.models.seq2seq_contract")

settings.register_profile("here", deadline=None)  # a busy machine makes no test wrong; pytest's own time limit holds
settings.load_profile("here")


_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="where models run in the tests that ask for a device: cpu, npu, cuda"
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """What --device says; the tests are skipped where it can't be used, but for one that should be there."""
    name: str = request.config.getoption("--device")
    try:
        open_device(name)
    except DeviceError as error:
        if "ASCEND_HOME_PATH" in os.environ:
            raise
        pytest.skip(str(error))
    return name


@pytest.fixture
def stopped_workers(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[subprocess.Popen[bytes]]:
    """The workers that a test starts, each as if it hung in a driver: nothing but SIGKILL ends it, and soon."""
    workers: asyncio.Queue[subprocess.Popen[bytes]] = asyncio.Queue()
    spawn = ipc.spawn

    def stopped(module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        process, ours = spawn(module, *arguments)
        process.send_signal(signal.SIGSTOP)
        workers.put_nowait(process)
        return process, ours

    monkeypatch.setattr(ipc, "spawn", stopped)
    monkeypatch.setattr(ipc, "PATIENCE_S", 0.2)
    return workers


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: a process a core, where each may have a /dev/shm of its own; else all tests in this one.

    Tests look at all of /dev/shm, kill owners of arenas and collect what they leave: two at once must not meet there.
    """
    tried = ("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(SHM_DIRECTORY))
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True, check=False).returncode:
        return 0
    return len(os.sched_getaffinity(0))


def pytest_configure(config: pytest.Config) -> None:
    """Has worker processes find the tests' own modules; gives one of several its own /dev/shm, and one thread."""
    paths = [str(config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if not hasattr(config, "workerinput"):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.mount(b"tmpfs", os.fsencode(SHM_DIRECTORY), b"tmpfs", 0, None)
    ):
        raise OSError(ctypes.get_errno(), "no /dev/shm of its own")


@pytest.fixture(autouse=True)
def shared_memory_as_found() -> Iterator[None]:
    """/dev/shm after a test is as before it: no arena of the dead, or of this process; no segment of this user.

    Arenas of other living processes are theirs: a server that tests share may start a tokenizer at any time.
    """
    before = _leftovers()
    yield
    assert _leftovers() - before == set()


def _leftovers() -> set[str]:
    arenas = (arena for arena in survey() if not arena.alive or arena.owner is None or arena.owner.pid == os.getpid())
    return {arena.file for arena in arenas} | {str(path) for path in SHM_DIRECTORY.glob("psm_*") if _is_ours(path)}


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False
