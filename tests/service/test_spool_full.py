"""Tests for the limit of the spool, and errors of its file system. Affected requests get 503 and may be retried."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
import pybase64
import pytest

from mindie_mm.errors import InputError, SharedMemoryError, SpoolFull, StaleReference, os_errors_as
from mindie_mm.inputs import Media
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.shm import Arena, ArraySpec, attach, collect, request_directory
from service.request import quota as spending
from service.request.media import MediaPolicy
from service.request.prompts import spool_directory
from service.request.quota import SpoolProbe, room_to_spool
from tests.service.conftest import SETTINGS, TINY
from tests.warm import running_service
from tools.demo import draw_shape

KiB = 2**10


def of_size(num_bytes: int) -> Media:
    return Media("image", pybase64.b64encode(bytes(num_bytes)).decode())


async def test_the_media_of_all_requests_are_bounded_and_given_back(tmp_path: Path) -> None:
    policy = MediaPolicy(ServiceConfig(max_media_bytes=30, max_spool_bytes=50))
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    await policy.spool([of_size(15), of_size(15)], first)
    for _ in range(3):  # media that were refused do not count
        with pytest.raises(
            SpoolFull, match="the media of all requests in progress would total 54 bytes; the limit is 50"
        ):
            await policy.spool([of_size(24)], second)
        policy.remove(second)
    for _ in range(2):  # the second removal must not free space again
        policy.remove(first)
    await asyncio.gather(policy.spool([of_size(30)], first), policy.spool([of_size(20)], second))
    with pytest.raises(SpoolFull, match="would total 51 bytes"):
        await policy.spool([of_size(1)], tmp_path)


def test_the_spool_must_hold_at_least_one_request() -> None:
    with pytest.raises(InputError, match="max_spool_bytes=29 must be at least max_media_bytes=30"):
        ServiceConfig(max_media_bytes=30, max_spool_bytes=29)


async def test_a_full_disk_is_reported_as_spool_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image/1.bin").symlink_to("/dev/full")
    with (
        pytest.raises(SpoolFull, match="the service cannot write to the spool: No space left on device"),
        room_to_spool(),
    ):
        await MediaPolicy(ServiceConfig()).spool([of_size(9)], tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        "the service cannot write to the spool: [Errno 28] No space left on device"
    ]


async def test_missing_descriptors_are_reported_as_spool_full(tmp_path: Path) -> None:
    """SpoolFull asks the client to try again, because neither the client nor the service is at fault."""
    (tmp_path / "in.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    policy = MediaPolicy(ServiceConfig(allowed_media_dir=tmp_path))
    await policy.spool([Media("image", str(tmp_path / "in.png"))], tmp_path)  # starts the reader thread
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(SpoolFull, match="Too many open files"), room_to_spool():
            await policy.spool([Media("image", str(tmp_path / "in.png"))], tmp_path)
        with pytest.raises(SpoolFull, match="Too many open files"), room_to_spool(), request_directory(tmp_path / "s"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EDQUOT, errno.ENOSPC, errno.EACCES, errno.ESTALE])
def test_any_error_of_the_spool_is_reported_without_its_path(number: int, caplog: pytest.LogCaptureFixture) -> None:
    for wrapped in (False, True):
        wrapping = os_errors_as(SharedMemoryError, "/the/spool") if wrapped else nullcontext()
        with pytest.raises(SpoolFull) as raised, room_to_spool(), wrapping:
            raise OSError(number, os.strerror(number), "/the/spool/x")
        assert str(raised.value) == f"the service cannot write to the spool: {os.strerror(number)}"
    assert all("/the/spool" in record.getMessage() for record in caplog.records)


async def test_a_spool_that_is_not_a_folder_is_reported_as_full(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpoolFull, match="File exists"), room_to_spool(), request_directory(tmp_path / "file"):
        pass
    with pytest.raises(SpoolFull, match="File exists"):
        await SpoolProbe(tmp_path / "file").check()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SpoolFull, match="see the log of the service"):
        await SpoolProbe(tmp_path / "link").check()
    await SpoolProbe(tmp_path / "new").check()
    assert list((tmp_path / "new").iterdir()) == []


async def test_a_file_system_that_does_not_answer_is_reported_as_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the file system does not answer, all checks wait for the same thread."""
    answer, asked = threading.Event(), []
    monkeypatch.setattr(spending, "PROBE_S", 0.01)
    monkeypatch.setattr(spending, "make_spool", lambda root: (asked.append(root), answer.wait(30)))
    probe = SpoolProbe(tmp_path)
    for _ in range(3):
        with pytest.raises(SpoolFull, match="its file system has not responded for"):
            await probe.check()
    answer.set()
    monkeypatch.setattr(spending, "PROBE_S", 30)
    await probe.check()
    assert asked == [tmp_path]


async def test_callers_that_overlap_all_get_an_answer(tmp_path: Path) -> None:
    probe = SpoolProbe(tmp_path)

    async def check_repeatedly() -> None:
        for _ in range(50):
            await probe.check()

    await asyncio.gather(*(check_repeatedly() for _ in range(8)))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on which a separate file system is mounted."""
    folder = tmp_path / "mounted"
    folder.mkdir(mode=0o700)
    mount = ("mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(folder))
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may mount nothing")
    yield folder
    subprocess.run(("umount", "--lazy", str(folder)), check=True)


@pytest.mark.slow
def test_a_read_only_file_system_fails_media_requests_until_it_is_writable(
    mounted: Path, tmp_path: Path, red_square: str
) -> None:
    content = [{"type": "image_url", "image_url": red_square}]
    asking = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    text = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 2}

    def remount(how: str) -> None:
        subprocess.run(("mount", "-o", f"remount,{how}", str(mounted)), check=True)

    def ask(body: dict[str, Any]) -> Any:
        return http.post("/v1/chat/completions", json=body)

    with (
        running_service(SETTINGS | {"spool": mounted}, tmp_path / "log", TINY) as running,
        httpx2.Client(base_url=running.url, timeout=60) as http,
    ):
        assert ask(asking).status_code == http.get("/health").status_code == 200
        remount("ro")
        for answer in (ask(asking), http.get("/health")):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert error["message"] == "the service cannot write to the spool: Read-only file system"
            assert error["type"] == "ServiceUnavailableError"
        assert ask(text).status_code == 200
        remount("rw")
        assert ask(asking).status_code == http.get("/health").status_code == 200
    assert str(mounted) in (tmp_path / "log").read_text()


def test_a_folder_that_cannot_be_removed_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The memory is freed immediately. The next reclaim removes the folder."""
    with Arena.create(2**16) as arena:
        with spool_directory(tmp_path / "spool") as directory:
            bind = ("mount", "--bind", str(directory.path), str(directory.path))  # makes the folder busy
            if subprocess.run(bind, capture_output=True, check=False).returncode:
                pytest.skip("this user may mount nothing")
            with arena.allocate({"x": ArraySpec((1,), "uint8")}, path_file=directory.path_file) as block:
                ref = block.publish()
        assert "it is removed at the next reclaim" in caplog.text
        with pytest.raises(StaleReference), attach(ref) as view:
            view.verify()
        subprocess.run(("umount", str(directory.path)), check=True)
        assert [one.cause for one in collect([tmp_path / "spool"]).reclaimed] == ["request_dead"]


def test_a_request_that_finds_the_spool_full_gets_503_with_retry_after(tmp_path: Path) -> None:
    """The request gets 503 while the image of another request is fetched, and 200 after that request is answered."""
    body = tmp_path / "a.png"
    draw_shape("red", (220, 40, 40), "square", x=0.4).save(body)
    data = body.read_bytes()
    data += bytes(40 * KiB - len(data))
    started, go_on = threading.Event(), threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(KiB)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:-1])
            started.set()
            go_on.wait(120)
            connection.sendall(data[-1:])

    def ask(url: str) -> Any:
        content = [{"type": "image_url", "image_url": url}]
        return http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        )

    inline = f"data:;base64,{pybase64.b64encode(data).decode()}"
    settings = SETTINGS | {"spool": tmp_path / "spool", "max_media_bytes": 64 * KiB, "max_spool_bytes": 64 * KiB}
    settings |= {"allow_private_media": True}
    with (
        running_service(settings, tmp_path / "log", TINY) as running,
        httpx2.Client(base_url=running.url, timeout=300) as http,
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor() as threads,
    ):
        served = threads.submit(serve, listener)
        remote = threads.submit(ask, f"http://127.0.0.1:{listener.getsockname()[1]}/")
        try:
            assert started.wait(120)
            refused = ask(inline)
            while refused.status_code == 200:  # the service has not read the remote image yet
                refused = ask(inline)
        finally:
            go_on.set()
        served.result()
        assert remote.result().status_code == 200, remote.result().text
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert "the limit is 65536" in refused.json()["error"]["message"]
        assert ask(inline).status_code == 200
