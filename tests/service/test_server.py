"""Starting and stopping: whatever ends the service, nothing is left in shared memory."""

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mindie_mm.config import ServiceConfig
from mindie_mm.errors import InputError
from mindie_mm.shm import collect
from service.server import _bound
from tools.serving import RunningService, running_service


def start_endless_stream(service: RunningService, red_square: str) -> socket.socket:
    """A streamed answer of which the first event has come."""
    host = urlsplit(service.url)
    assert host.hostname is not None
    limit = service.get("/v1/models")["data"][0]["max_model_len"]
    body = {
        "messages": [{"role": "user", "content": [{"image": red_square}, {"text": "What?"}]}],
        "stream": True,
        "max_tokens": limit // 2,
        "n": 8,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    connection = socket.create_connection((host.hostname, host.port or 80), timeout=30)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def wait_until_gone(arenas: list[str], timeout_s: float = 20) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while (left := [name for name in arenas if Path("/dev/shm", name).exists()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def names(found: dict[str, Any]) -> list[str]:
    arenas = [arena["name"] for arena in found["arenas"]]
    assert arenas
    assert found["blocks"] > 0
    return arenas


def test_sigterm_ends_what_runs_and_frees_all(settings: dict[str, object], tmp_path: Path, red_square: str) -> None:
    spool = tmp_path / "spool"
    with running_service(settings | {"spool": spool}, tmp_path / "log") as service:
        with start_endless_stream(service, red_square) as connection:
            arenas = names(service.shm())
            service.process.send_signal(signal.SIGTERM)
            rest = read_all(connection)
        assert service.process.wait(30) == 0
    assert b"the service stopped before the request was finished" in rest or b'"finish_reason":"length"' in rest
    assert b"data: [DONE]" in rest
    assert wait_until_gone(arenas, 0) == []
    assert list(spool.iterdir()) == []


def test_a_killed_service_is_cleaned_up_by_the_next(
    settings: dict[str, object], tmp_path: Path, red_square: str
) -> None:
    spool = tmp_path / "spool"
    with (
        running_service(settings | {"spool": spool}, tmp_path / "log") as killed,
        start_endless_stream(killed, red_square),
    ):
        arenas = names(killed.shm())
        killed.process.kill()
        killed.process.wait()
    (left,) = spool.iterdir()
    with running_service(settings | {"spool": spool}, tmp_path / "log2") as service:
        assert not left.exists()
        assert service.shm()["blocks"] == 0
        collect()
        assert wait_until_gone(arenas) == []
        assert service.stop() == 0


def test_a_port_in_use(settings: dict[str, object], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}"),
            running_service(settings | {"port": port, "spool": tmp_path}, tmp_path / "log"),
        ):
            pytest.fail("started")


def test_a_folder_of_data_is_no_spool(settings: dict[str, object], tmp_path: Path) -> None:
    """Its folders look like requests of the dead, which are removed."""
    (tmp_path / "a" / "image").mkdir(parents=True)
    (tmp_path / "a" / "shm_name.txt").touch()
    with (
        pytest.raises(RuntimeError, match=f"{tmp_path / 'a'} is no request directory .*is no spool"),
        running_service(settings | {"spool": tmp_path}, tmp_path / "log"),
    ):
        pytest.fail("started")
    assert (tmp_path / "a" / "image").is_dir()


def test_only_failing_to_listen_is_called_so() -> None:
    with pytest.raises(FileNotFoundError), _bound("127.0.0.1", 0):
        raise FileNotFoundError("a worker's")


def test_settings_that_would_stall_the_service() -> None:
    with pytest.raises(InputError, match="max_concurrent_fetches is 0, it must be at least 1"):
        ServiceConfig(max_concurrent_fetches=0)
