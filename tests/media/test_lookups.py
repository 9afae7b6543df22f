"""Tests for concurrent name lookups. A nameserver that does not answer must not delay other names for long."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from aiohttp.test_utils import TestServer

from mindie_mm.errors import MediaError
from mindie_mm.inputs import Media
from mindie_mm.media.fetch import http as module
from mindie_mm.media.fetch.http import fetch
from mindie_mm.media.fetch.threads import Threads
from mindie_mm.settings.config import ServiceConfig
from service.request.media import MediaPolicy

BODY = b"an image"


class Names:
    """A fake getaddrinfo. Names under .dead hang until `go` is set, and names under .live resolve to this machine."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self._lock = threading.Lock()
        self._begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.asked = Counter[str]()

    def __call__(self, host: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.asked[host] += 1
        self._begun.release()
        if host.endswith(".dead"):
            assert self.go.wait(300)
        return self._system("127.0.0.1" if host.endswith((".dead", ".live")) else host, *args, **kwargs)

    async def wait_for(self, num_lookups: int) -> None:
        """Wait until `num_lookups` more lookups have started."""
        for _ in range(num_lookups):
            assert await asyncio.to_thread(self._begun.acquire, timeout=300)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    found = Names(socket.getaddrinfo)
    monkeypatch.setattr(socket, "getaddrinfo", found)
    lookups = Threads("lookup")
    monkeypatch.setattr(module, "LOOKUPS", lookups)
    yield found
    found.go.set()
    for thread in threading.enumerate():
        if thread.name == "lookup":
            thread.join(120)
    assert not lookups._running
    assert not lookups._waiting


async def get(host: str, port: int = 9, **changes: Any) -> bytes:
    settings = {"max_bytes": 100, "timeout_s": 30.0, "allow_private": True}
    return await fetch(f"http://{host}:{port}/", **(settings | changes))


async def ended(tasks: list[asyncio.Task[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_an_address_comes_from_the_lookup(names: Names) -> None:
    (found,) = await module._Resolver(allow_private=True, request=None).resolve("a.live", 80)
    assert (found["hostname"], found["host"], found["port"]) == ("a.live", "127.0.0.1", 80)
    with pytest.raises(MediaError, match="not public"):
        await get("a.live", allow_private=False)


def test_hanging_names_do_not_delay_other_names(names: Names) -> None:
    """The names of two requests hang, even after the fetches of these requests were canceled."""

    async def media(request: web.Request) -> web.Response:
        return web.Response(body=BODY)

    async def hang(name: str) -> None:
        tasks = [asyncio.create_task(get(f"{name}.{i}.dead", request=name)) for i in range(20)]
        await asyncio.wait(tasks, timeout=0.5)

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/", media)
        async with TestServer(app, host="127.0.0.1") as server, asyncio.timeout(120):
            assert server.port is not None
            hanging = [asyncio.create_task(hang(name)) for name in "ab"]
            await names.wait_for(8)
            assert await get("b.live", server.port) == BODY
            await asyncio.wait(hanging)
            assert await get("c.live", server.port) == BODY
            assert sum(names.asked.values()) == 10
            names.go.set()
            async with asyncio.timeout(120):
                await asyncio.wait([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    uvloop.run(run())


async def test_the_lookups_of_one_request_are_limited(names: Names, tmp_path: Path) -> None:
    policy = MediaPolicy(ServiceConfig(allow_private_media=True, max_concurrent_fetches=64))

    async def request(name: str) -> None:
        items = [Media("image", f"http://{name}.{i}.dead:9/") for i in range(6)]
        spooled = [policy.spool([item], tmp_path / name) for item in items]
        await asyncio.gather(*spooled, return_exceptions=True)

    tasks = [asyncio.create_task(request(name)) for name in ("a", "b")]
    await names.wait_for(8)
    assert Counter(host[0] for host in names.asked) == {"a": 4, "b": 4}
    names.go.set()
    await asyncio.wait(tasks)
    assert len(names.asked) == 12


async def test_all_lookups_together_are_limited(names: Names) -> None:
    tasks = [asyncio.create_task(get(f"a.{i}.dead")) for i in range(70)]
    await names.wait_for(64)
    assert len(names.asked) == 64
    names.go.set()
    await asyncio.wait(tasks)
    assert len(names.asked) == 70


def test_a_hanging_lookup_does_not_keep_the_process_alive() -> None:
    program = """
import asyncio, socket, threading
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.errors import MediaError
from mindie_mm.inputs import Media
from mindie_mm.media.fetch.http import fetch

socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
try:
    asyncio.run(fetch("http://a.dead/", max_bytes=1, timeout_s=0.1))
except MediaError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "fetching from a.dead took longer than the limit of 0.1 s\n"
    assert ended.stderr == ""
