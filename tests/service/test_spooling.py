"""Tests that the service writes a request's media to its directory, within the limits of the media policy."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from io import FileIO
from pathlib import Path
from typing import Any

import pybase64
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.inputs import Media
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.shm.spool import collect_request, request_directories
from service.request.media import MediaPolicy
from service.request.spool_folders import PlanFolder


async def test_media_are_numbered_in_order_by_kind(tmp_path: Path) -> None:
    source = tmp_path / "in.png"
    source.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    policy = MediaPolicy(ServiceConfig(allowed_media_dir=tmp_path))
    request = tmp_path / "request"
    request.mkdir()
    items = [Media("image", str(source)) for _ in range(11)]
    items.insert(3, Media("video", "data:video/mp4;base64,AAAAIGZ0eXBpc29t"))
    paths = await policy.spool(items, request)
    relative = [str(path.relative_to(request)) for path in paths]
    assert relative == [
        *(f"image/{n}.png" for n in (1, 2, 3)),
        "video/1.mp4",
        *(f"image/{n}.png" for n in range(4, 12)),
    ]
    assert paths[0].read_bytes() == source.read_bytes()
    policy.remove(request)
    assert list(request.iterdir()) == []


async def test_requests_that_share_the_folder_for_plans_have_files_and_limits_of_their_own(tmp_path: Path) -> None:
    plans = PlanFolder(tmp_path / "spool")
    policy = MediaPolicy(ServiceConfig(max_media_bytes=4))
    places = [plans.place(), plans.place()]
    given = zip(places, ("QUJDRA==", "RUZHSA=="), strict=True)
    first, second = [(await policy.spool([Media("image", data)], *place))[0] for place, data in given]
    assert (first.parent, first.read_bytes(), second.read_bytes()) == (second.parent, b"ABCD", b"EFGH")
    policy.remove(*places[0])
    assert (first.exists(), second.exists()) == (False, True)
    policy.remove(*places[1])
    plans.close()
    assert not [*(tmp_path / "spool").iterdir()]


_KILLED = """
import os, signal, sys
from pathlib import Path
from service.request.spool_folders import PlanFolder

plans = PlanFolder(Path(sys.argv[1]))
folder, prefix = plans.place()
(folder / f"{prefix}image-1.png").write_bytes(b"media")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_for_plans_is_reclaimed_only_after_the_death_of_its_service(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (dead,) = request_directories(tmp_path)
    plans = PlanFolder(tmp_path)
    alive, _ = plans.place()
    assert (collect_request(dead), collect_request(alive)) == (True, False)
    assert [*tmp_path.iterdir()] == [alive]
    plans.close()


async def test_the_media_of_a_request_may_not_exceed_the_limit(tmp_path: Path) -> None:
    policy = MediaPolicy(ServiceConfig(max_media_bytes=20))
    items = [Media("image", "data:;base64,AAAAAAAAAAAAAAAAAAAA")] * 2
    with pytest.raises(
        LimitExceeded, match=r"item 1 \(image\): the request's media would total 30 bytes; the limit is 20"
    ):
        await policy.spool(items, tmp_path)


async def test_an_item_may_be_exactly_as_long_as_the_limit(tmp_path: Path) -> None:
    policy = MediaPolicy(ServiceConfig(max_item_bytes=4, max_media_bytes=4))
    (path,) = await policy.spool([Media("image", "data:;base64,QUJDRA==")], tmp_path)
    assert path.read_bytes() == b"ABCD"
    with pytest.raises(LimitExceeded, match="5 bytes; the limit for one item is 4"):
        await policy.spool([Media("image", "QUJDREU=")], tmp_path)


@pytest.mark.parametrize("source", ["QUJD\nRA==\n", "data:;base64,QUJDRA==\r\n", "data:;base64, Q U J D R A = ="])
async def test_white_space_in_base64_does_not_count(tmp_path: Path, source: str) -> None:
    policy = MediaPolicy(ServiceConfig(max_item_bytes=4, max_media_bytes=4))
    (path,) = await policy.spool([Media("image", source)], tmp_path)
    assert path.read_bytes() == b"ABCD"
    policy.remove(tmp_path)
    with pytest.raises(LimitExceeded, match="4 bytes; the limit for one item is 3"):
        await MediaPolicy(ServiceConfig(max_item_bytes=3)).spool([Media("image", source)], tmp_path)


async def test_long_base64_is_decoded_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(*args: Any, **kwargs: Any) -> bytes:
        threads.append(threading.get_ident())
        return decode(*args, **kwargs)

    decode = pybase64.b64decode
    monkeypatch.setattr("pybase64.b64decode", noted)
    await MediaPolicy(ServiceConfig()).spool([Media("image", "data:;base64," + "AAAA" * 2**18)], tmp_path)
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("path", ["/proc/self/environ", "/proc/version", "/sys/kernel/uevent_seqnum"])
async def test_files_of_proc_and_sys_are_refused_in_any_allowed_folder(tmp_path: Path, path: str) -> None:
    policy = MediaPolicy(ServiceConfig(allowed_media_dir=Path("/")))
    with pytest.raises(MediaError, match="there is no such file in the allowed media folder"):
        await policy.spool([Media("image", path)], tmp_path)


async def test_a_file_that_grows_while_it_is_read_stays_within_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.png").write_bytes(bytes(5000))
    fstat = os.fstat

    def before(descriptor: int) -> os.stat_result:
        status = [*fstat(descriptor)]
        status[stat.ST_SIZE] = 10
        return os.stat_result(status)

    monkeypatch.setattr("service.request.media.os.fstat", before)
    for config, message in (
        (ServiceConfig(allowed_media_dir=tmp_path, max_item_bytes=4000), "the limit for one item is 4000"),
        (ServiceConfig(allowed_media_dir=tmp_path, max_media_bytes=4000), "would total 5000 bytes; the limit is 4000"),
    ):
        with pytest.raises(LimitExceeded, match=message):
            await MediaPolicy(config).spool([Media("image", str(tmp_path / "in.png"))], tmp_path)


async def test_a_file_read_after_its_request_ended_is_neither_written_nor_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stalled mount delays the read until the request has ended."""
    started, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Stalled(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(-1 if size is None else size)
            loop.call_soon_threadsafe(started.set)
            assert go.wait(120)
            return data

    source, request = tmp_path / "in.png", tmp_path / "request"
    source.write_bytes(bytes(50))
    request.mkdir()
    monkeypatch.setattr("service.request.media.FileIO", Stalled)
    policy = MediaPolicy(ServiceConfig(allowed_media_dir=tmp_path, max_media_bytes=50))
    spooling = asyncio.create_task(policy.spool([Media("image", str(source))], request))
    await started.wait()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "media-file"]
    spooling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spooling
    policy.remove(request)
    go.set()
    await asyncio.to_thread(thread.join)
    assert list(request.iterdir()) == []
    await policy.spool([Media("image", str(source))], request)


async def test_a_fetch_ends_at_the_limit_of_the_request(tmp_path: Path, web_server: str, sent: list[int]) -> None:
    config = ServiceConfig(allow_private_media=True, max_item_bytes=1 << 30, max_media_bytes=1 << 20)
    with pytest.raises(LimitExceeded, match=r"the request's media would total \d+ bytes; the limit is 1048576"):
        await MediaPolicy(config).spool([Media("image", f"{web_server}/endless")] * 4, tmp_path)
    assert sum(sent) < 64 << 20, "what the sockets buffer may come on top"


async def test_all_requests_share_the_limit_of_concurrent_fetches(tmp_path: Path, web_server: str) -> None:
    policy = MediaPolicy(ServiceConfig(allow_private_media=True, max_concurrent_fetches=2))
    items = [Media("image", f"{web_server}/crowd")] * 3
    for name in "ab":
        (tmp_path / name).mkdir()
    paths = await asyncio.gather(*(policy.spool(items, tmp_path / name) for name in "ab"))
    assert max(path.read_bytes()[-1] for of_request in paths for path in of_request) == 2


async def test_one_request_may_use_only_a_share_of_the_fetches(tmp_path: Path, web_server: str) -> None:
    policy = MediaPolicy(ServiceConfig(allow_private_media=True, max_concurrent_fetches=8))
    paths = await policy.spool([Media("image", f"{web_server}/crowd")] * 6, tmp_path)
    assert max(path.read_bytes()[-1] for path in paths) == 2


async def test_the_frames_of_a_video_are_numbered_under_their_video(tmp_path: Path, web_server: str) -> None:
    source = tmp_path / "in.png"
    source.write_bytes(b"\x89PNG\r\n\x1a\n")
    policy = MediaPolicy(ServiceConfig(allowed_media_dir=tmp_path, allow_private_media=True))
    frames = (str(source), f"{web_server}/a", "data:image/jpeg;base64,/9j/4AAQ", source.as_uri())
    request = tmp_path / "request"
    request.mkdir()
    first, second, third = await policy.spool(
        [Media("video", "AAAAIGZ0eXBpc29t"), Media("video", frames), Media("image", str(source))], request
    )
    assert isinstance(second, list)
    relative = [str(path.relative_to(request)) for path in second]
    assert relative == ["video/2-1.png", "video/2-2.png", "video/2-3.jpg", "video/2-4.png"]
    assert [first, third] == [request / "video/1.mp4", request / "image/1.png"]
    assert second[1].read_bytes()[-2:] == b"/a"
    policy.remove(request)
    assert list(request.iterdir()) == []


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ("/etc/hostname", "there is no such file in the allowed media folder"),
        ("file:///etc/hostname", "there is no such file in the allowed media folder"),
        ("http://127.0.0.1:9/a.jpg", "its address is not public"),
        ("http://[::1]:9/a.jpg", "its address is not public"),
        ("https://elsewhere.org/a.jpg", "elsewhere.org is not one of the allowed media domains"),
        ("ftp://host/a.jpg", "the URL has the scheme 'ftp'"),
        ("data:image/jpeg;base64,AAA", "base64 of the data: URL is not valid"),
        ("data:image/jpeg;base64," + "AAAA" * 11, "33 bytes; the limit for one item is 30"),
        ("data:image/jpeg;base64,AAAA\ud800", "a lone surrogate"),
    ],
    ids=str,
)
async def test_a_frame_obeys_the_media_policy_of_images(tmp_path: Path, frame: str, message: str) -> None:
    domains = ("127.0.0.1", "::1") if "9/" in frame else ("example.org",)
    config = ServiceConfig(allowed_media_dir=tmp_path, allowed_media_domains=domains, max_item_bytes=30)
    with pytest.raises(InputError, match=rf"media item 1 \(video\): frame 0: .*{message}"):
        await MediaPolicy(config).spool([Media("image", "AAAA"), Media("video", (frame,))], tmp_path)


async def test_the_frames_of_a_video_count_as_one_item(tmp_path: Path, web_server: str, sent: list[int]) -> None:
    policy = MediaPolicy(ServiceConfig(max_item_bytes=12, max_media_bytes=30, allow_private_media=True))
    await policy.spool([Media("video", ("AAAA",) * 4), Media("image", "A" * 16)], tmp_path)
    policy.remove(tmp_path)
    with pytest.raises(
        LimitExceeded, match=r"\(video\): frame \d: the item has at least 15 bytes; the limit for one item is 12"
    ):
        await policy.spool([Media("video", ("AAAA",) * 5)], tmp_path)
    policy.remove(tmp_path)
    with pytest.raises(LimitExceeded, match=r"the request's media would total \d+ bytes; the limit is 30"):
        await policy.spool([Media("video", ("AAAA",) * 4)] * 3, tmp_path)
    many = MediaPolicy(ServiceConfig(max_item_bytes=1 << 20, allow_private_media=True))
    sent.clear()
    with pytest.raises(LimitExceeded, match="the limit for one item"):
        await many.spool([Media("video", (f"{web_server}/endless",) * 8)], tmp_path)
    assert sum(sent) < 64 << 20, "what the sockets buffer may come on top"


async def test_a_request_with_too_many_frames_is_refused(tmp_path: Path) -> None:
    videos = [Media("video", ("AAAA",) * 1025)] * 2
    with pytest.raises(LimitExceeded, match="the request has 2050 frames in lists; the limit is 2048"):
        await MediaPolicy(ServiceConfig()).spool(videos, tmp_path)


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("width", [3, 64, 76])
async def test_base64_of_a_jpeg_is_not_a_path(tmp_path: Path, width: int, end: str) -> None:
    policy = MediaPolicy(ServiceConfig(allowed_media_dir=tmp_path))
    text = "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBD" * 3
    source = end.join(text[at : at + width] for at in range(0, len(text), width)) + end
    (path,) = await policy.spool([Media("image", source)], tmp_path)
    assert path.suffix == ".jpg"


@pytest.fixture(scope="module")
def sent() -> list[int]:
    """Return a list to which `/endless` appends the size of each piece that it sends, in bytes."""
    return []


@pytest_asyncio.fixture(scope="module")
async def web_server(sent: list[int]) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"\x89PNG\r\n\x1a\n" + request.path.encode())

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(10_000):
            await response.write(bytes(1 << 16))
            sent.append(1 << 16)
        return response

    inside = 0
    pairs = asyncio.Barrier(2)

    async def crowd(_: web.Request) -> web.Response:
        """Wait until two requests are open, and answer each with the number of open requests that it has observed."""
        nonlocal inside
        inside += 1
        body = bytes([inside])
        await pairs.wait()
        body = max(body, bytes([inside]))
        await pairs.wait()
        inside -= 1
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/endless", endless)
    app.router.add_get("/crowd", crowd)
    app.router.add_get("/{name}", answer)
    async with TestServer(app, host="127.0.0.1") as running:
        yield f"http://127.0.0.1:{running.port}"


async def test_media_are_fetched_from_the_web_unless_the_address_is_private(tmp_path: Path, web_server: str) -> None:
    policy = MediaPolicy(ServiceConfig(allow_private_media=True))
    paths = await policy.spool([Media("image", f"{web_server}/{name}") for name in "abc"], tmp_path)
    assert [path.read_bytes()[-2:] for path in paths] == [b"/a", b"/b", b"/c"]
    with pytest.raises(MediaError, match=r"media item 0 \(image\): .* not public"):
        await MediaPolicy(ServiceConfig()).spool([Media("image", web_server)], tmp_path)


async def test_one_invalid_source_fails_the_request(tmp_path: Path, web_server: str) -> None:
    policy = MediaPolicy(ServiceConfig(allow_private_media=True))
    with pytest.raises(MediaError, match="media item 1"):
        await policy.spool([Media("image", f"{web_server}/a"), Media("image", "?")], tmp_path)
