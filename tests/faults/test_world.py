"""Tests for services that run beside other services, or whose shared memory is full, lost or damaged."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mindie_mm.shm import collect
from tests.namespaces import FULL_SHM, require
from tests.warm import running_service
from tests.watching import metric
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

MiB = 1 << 20
SETTINGS = {"arena_bytes": 32 * MiB, "kv_cache_bytes": 64 * MiB, "reclaim_interval_s": 0.2, "grace_s": 0.2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningService, RunningService]]:
    """Yield two services of the same user that share a spool."""
    folder = tmp_path_factory.mktemp("pair")
    settings = SETTINGS | {"spool": folder / "spool"}
    with running_service(settings, folder / "log1") as first, running_service(settings, folder / "log2") as second:
        yield first, second
        assert (first.stop(), second.stop()) == (0, 0)
    assert list((folder / "spool").iterdir()) == []


def body(**changes: Any) -> bytes:
    url = data_url(draw_shape("red", (220, 40, 40), "square", x=0.4))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the image?"}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "temperature": 0} | changes).encode()


def ask(service: RunningService) -> tuple[int, str]:
    """Ask about an image of a red square. Return the status and the answer, or the status and the error message."""
    request = urllib.request.Request(
        f"{service.url}/v1/chat/completions", body(max_tokens=16), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def is_right(answer: tuple[int, str]) -> bool:
    status, text = answer
    return status == 200 and "red" in text and "square" in text


def streamed(service: RunningService) -> socket.socket:
    """Request a streamed answer, wait for its status line, and return the connection."""
    host = urlsplit(service.url)
    data = body(max_tokens=60, ignore_eos=True, stream=True)
    connection = socket.create_connection((host.hostname, host.port), timeout=300)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Read a streamed answer up to `[DONE]`."""
    data = b""
    while b"data: [DONE]" not in data:
        part = connection.recv(1 << 16)
        assert part, data[-1000:]
        data += part
    return data


def arenas(service: RunningService) -> list[Path]:
    return [Path("/dev/shm", arena["name"]) for arena in service.shm()["arenas"]]


@pytest.mark.slow
def test_two_services_on_one_spool_do_not_disturb_each_other(pair: tuple[RunningService, RunningService]) -> None:
    """While one service streams an answer, the other service answers, and the test itself calls `collect`."""
    for running, other in (pair, pair[::-1]):
        with streamed(running) as connection:
            assert metric(running, "num_requests_running") == 1
            found = collect()
            assert not set(found.of("owner_dead")) & set(map(str, arenas(running)))
            assert is_right(ask(other))
            assert is_right(ask(running))
            rest = read_all(connection)
        assert b'"finish_reason":"length"' in rest
    for service in pair:
        assert service.wait_until_free()["blocks"] == 0


@pytest.mark.slow
def test_a_service_on_a_port_in_use_ends_with_one_line_and_disturbs_no_other(
    pair: tuple[RunningService, RunningService], tmp_path: Path
) -> None:
    first, _ = pair
    with streamed(first) as connection:
        port = urlsplit(first.url).port
        command = [str(Path(sys.executable).with_name("mindie-mm")), "serve", f"--port={port}"]
        spool = first.log.parent / "spool"
        again = subprocess.run(
            [*command, f"--spool={spool}"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
        )
        assert again.returncode == 1, again.stderr
        assert again.stdout == ""
        assert again.stderr.splitlines()[-1].endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")
        assert "Traceback" not in again.stderr
        assert b'"finish_reason":"length"' in read_all(connection)
    assert is_right(ask(first))


def unlink(arena: Path) -> None:
    arena.unlink()


def cut_to_nothing(arena: Path) -> None:
    os.truncate(arena, 0)


def cut_by_a_page(arena: Path) -> None:
    os.truncate(arena, arena.stat().st_size - 4096)


def cut_by_a_byte(arena: Path) -> None:
    os.truncate(arena, arena.stat().st_size - 1)


def damage_its_header(arena: Path) -> None:
    with arena.open("r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 16)


@pytest.mark.parametrize("harm", [unlink, cut_to_nothing, cut_by_a_page, cut_by_a_byte, damage_its_header])
def test_a_service_answers_again_after_its_arena_is_lost(
    pair: tuple[RunningService, RunningService], harm: Callable[[Path], None]
) -> None:
    """The service starts a new tokenizer and answers the next request correctly. The other service is not affected."""
    first, second = pair
    assert is_right(ask(first))
    (arena,) = arenas(first)
    harm(arena)
    assert is_right(answer := ask(first)), answer
    assert is_right(ask(second))
    assert is_right(ask(first)), "it stays well"
    assert not arena.exists() or arena.stat().st_size == 0 or arena in arenas(first)
    if arena.exists() and arena not in arenas(first):
        arena.unlink()  # an empty file does not record its owner, so nobody would remove it


@pytest.mark.slow
def test_a_service_without_room_in_shm_ends_with_advice(tmp_path: Path) -> None:
    require(FULL_SHM)
    command = [*FULL_SHM, str(Path(sys.executable).with_name("mindie-mm")), "serve", "--port=0"]
    done = subprocess.run(
        [*command, f"--arena-bytes={64 * MiB}", f"--spool={tmp_path / 'spool'}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    for words in (f"of {32 * MiB} bytes free", "the arena needs 67", "--shm-size", "emptyDir"):
        assert words in last
