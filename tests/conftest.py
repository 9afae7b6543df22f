"""Fixtures of all tests."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore2
import pytest
from hypothesis import settings

from mindie_mm.device import open_device
from mindie_mm.errors import DeviceError
from mindie_mm.processes import ipc
from mindie_mm.shm import survey
from mindie_mm.shm.format.layout import SHM_DIRECTORY
from mindie_mm.tokenize import stores

pytest_plugins = ["tests.ascend.counted", "tests.checkpoints", "tests.own_shm", "tests.recording", "tests.warm"]
# If an assertion of these modules fails, pytest shows the compared values, as it does for test modules.
pytest.register_assert_rewrite("tests.models.contract", "tests.models.mindie_contract", "tests.models.seq2seq_contract")

KERNELS = "onednn=no,blocks=no,wide=no,fused=yes,step=best,bfloat16=no"
"""Choices between kernels for all tests, so that no test depends on the processor. Every processor that
the tests run on supports these choices. tests/device/test_choices.py covers the others."""

settings.register_profile("here", deadline=None)  # tests may be slow on a busy machine; pytest has its own limit
settings.load_profile("here")

# Each HTTP client would read the root certificates again, which takes 50 ms of processor time.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# The kernel clears an arena's memory when it is created, which takes 0.1 s of processor time for the usual 256 MiB.
stores.ARENA_BYTES = 64 * 2**20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="where models run in the tests that ask for a device: cpu, npu, cuda"
    )
    parser.addoption(
        "--front",
        default="direct",
        choices=["direct", "ray"],
        help="how the shared service of tests/service is started",
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Return the device name that --device gives.

    Skip the test if the device cannot be used. Fail instead if ASCEND_HOME_PATH is set, because CANN is then installed.
    """
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
    """Stop each worker that a test starts, as if the worker hung in a driver, and return a queue of these workers.

    Only SIGKILL ends a stopped worker. To save time, the waits before SIGKILL are short.
    """
    workers: asyncio.Queue[subprocess.Popen[bytes]] = asyncio.Queue()
    spawn = ipc.spawn

    def stopped(module: str, *arguments: str, **options: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
        process, ours = spawn(module, *arguments, **options)
        process.send_signal(signal.SIGSTOP)
        workers.put_nowait(process)
        return process, ours

    exited, asked = ipc.exited, Counter[int]()

    async def soon(process: subprocess.Popen[bytes], _: float) -> int | None:
        """Wait 0.2 s after the first two signals, which cannot end a stopped process. Wait 60 s after SIGKILL."""
        asked[process.pid] += 1
        return await exited(process, 0.2 if asked[process.pid] < 3 else 60.0)

    monkeypatch.setattr(ipc, "spawn", stopped)
    monkeypatch.setattr(ipc, "exited", soon)
    return workers


MARKERS = (
    "slow: left to `make test-all`",
    "representative: run by `make test` for six families, because the other families would show the same",
)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment of the tests and of the processes that they start.

    These processes can import the tests' modules. They also receive SIGINT and SIGHUP, even if pytest runs under nohup
    or as a background job of a shell, where these signals are ignored.
    """
    gc.disable()  # until all tests are collected, because nearly everything that is created stays
    for marker in MARKERS:  # here, so that tests for a family in another repository know them, too
        config.addinivalue_line("markers", marker)
    # Of two values of one choice, the last one counts.
    os.environ["MINDIE_MM_KERNELS"] = ",".join([KERNELS, *filter(None, [os.environ.get("MINDIE_MM_KERNELS")])])
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    paths = [str(config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def pytest_collection_finish() -> None:
    """Leave the modules and tests out of later garbage collections, which would take half a second each."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def freed_memory_returned() -> Iterator[None]:
    """Return freed memory to the kernel after each module, because each fork copies the page tables of this process."""
    yield
    with contextlib.suppress(AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def shared_memory_as_found() -> Iterator[None]:
    """Check that a test leaves no segment in /dev/shm, and no arena of a dead process or of this process.

    Arenas of other living processes are allowed, because a shared server may start a tokenizer at any time.
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
