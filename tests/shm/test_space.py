"""Tests in namespaces: with an unlimited /dev/shm, with no free inodes in /dev/shm, and without /proc."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest

from mindie_mm.device.host_memory import available_bytes
from mindie_mm.doctor import machine as doctor
from mindie_mm.errors import DeviceError
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.shm.dev_shm import ShmSpace
from service.telemetry.metrics import _SharedMemory
from tests.shm.test_hostile import require, run

MOUNTED = ("unshare", "--mount", "sh", "-c")
NO_LIMIT = (*MOUNTED, 'mount -t tmpfs -o size=0 tmpfs /dev/shm && exec "$@"', "sh")
THREE_INODES = (*MOUNTED, 'mount -t tmpfs -o nr_inodes=3 tmpfs /dev/shm && exec "$@"', "sh")
NO_PROC = (*MOUNTED, 'mount -t tmpfs tmpfs /proc && exec "$@"', "sh")

SHOW = """
from mindie_mm.cli.shm_view import footer, line
from mindie_mm.shm.dev_shm import ShmSpace
def show():
    arenas = survey()
    say(footer(arenas, ShmSpace.now()))
    say(line(arenas, ShmSpace.now()))
"""
MAKE = """
from mindie_mm.shm.mindie import create_shm
for make in (lambda: Arena.create(1 << 20), lambda: create_shm(5000, Path(sys.argv[1]))):
    try: made = make()
    except MindieMMError as error: say(type(error).__name__, error)
    else: say("made")
"""


def test_an_unlimited_dev_shm_is_usable_and_shown_as_unlimited(tmp_path: Path) -> None:
    require(NO_LIMIT)
    whole = "with Arena.create(1 << 20) as arena: show()\n"
    *made, shown, logged = run(NO_LIMIT, SHOW + MAKE + whole, tmp_path / "shm_name.txt")
    assert made == ["made", "made"]
    assert shown.startswith("/dev/shm: no size limit; 1.")
    assert shown.endswith(" in 1 arena")
    assert logged.endswith("dev_shm_free_bytes unlimited dev_shm_bytes unlimited")


def test_the_error_reports_used_up_inodes(tmp_path: Path) -> None:
    require(THREE_INODES)
    use = 'for name in "ab": Path("/dev/shm/" + name).touch()\n'
    *errors, shown, _ = run(THREE_INODES, SHOW + use + MAKE + "show()", tmp_path / "shm_name.txt")
    for message in (*errors, shown):
        assert "all of its 3 inodes are used. Remove unused files" in message
        assert "mount -o remount,nr_inodes=" in message
    assert all(
        message.startswith("SharedMemoryError cannot create a file in /dev/shm: No space left") for message in errors
    )


def test_the_error_without_proc_says_how_to_mount_it(tmp_path: Path) -> None:
    require(NO_PROC)
    others = """
try: arenas_of([1])
except MindieMMError as error: say(type(error).__name__, error)
(failure,) = collect().failures
say(failure)
"""
    messages = run(NO_PROC, MAKE + others, tmp_path / "shm_name.txt")
    assert [message.partition(" ")[0] for message in messages] == ["SharedMemoryError"] * 3 + ["blocks"]
    assert all("needs /proc, which is not mounted: mount -t proc proc /proc" in message for message in messages)


def test_reading_the_memory_of_the_host_without_proc_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    with pytest.raises(
        DeviceError, match=r"the host's free memory cannot be read from /proc.*: No such file or directory"
    ):
        available_bytes()
    assert doctor._memory(WorkerConfig(), "cpu").status == "error"


@pytest.mark.parametrize(
    ("space", "status", "found"),
    [
        (ShmSpace(None, None, None, None, None), "ok", "/dev/shm has no size limit; 256 MiB will be reserved"),
        (ShmSpace(2**40, 0, 2**40, 9, 1), "ok", "/dev/shm has 1048576 MiB free"),
        (ShmSpace(2**40, 0, 2**40, 9, 0), "error", "no file can be created in /dev/shm"),
        (ShmSpace(2**20, 0, 2**20, None, None), "error", "/dev/shm has 1 MiB free"),
    ],
)
def test_doctor_and_metrics_show_limits_of_dev_shm(
    space: ShmSpace, status: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmSpace, "now", lambda: space)
    finding = doctor._shared_memory(WorkerConfig())
    assert (finding.status, finding.found[: len(found)]) == (status, found)
    bounds = [one.samples[0].value for one in _SharedMemory(list, "tiny")._filesystem()]
    assert bounds == [math.inf if bound is None else bound for bound in (space.total_bytes, space.free_bytes)]
