"""Addresses at which no Ray cluster answers. A run there ends soon, with the address and the reason."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("ray")

CLI = Path(sys.executable).with_name("mindie-mm")


def tokenize(tmp_path: Path, address: str) -> tuple[int, str]:
    """Run the command. Ray's own limit is more than 8 minutes, so only that fails the time limit."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    command = [CLI, "tokenize", tmp_path / "rows.jsonl", "--output", tmp_path / "run", "--ray", address]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


@pytest.fixture
def silent_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def web_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("kind", ["closed_port", "silent_port", "web_server"])
def test_an_address_where_no_cluster_answers(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    address = request.getfixturevalue(kind)
    status, said = tokenize(tmp_path, address)
    assert status == 2, said
    assert f"no Ray cluster can be joined at {address}: " in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("nowhere.invalid:6379", "no Ray cluster can be joined at nowhere.invalid:6379: "),
        ("127.0.0.1", "no Ray cluster can be joined at 127.0.0.1: "),
        ("ray://127.0.0.1:10001", "--ray ray://127.0.0.1:10001: a run joins a cluster itself"),
        ("http://127.0.0.1:8265", "--ray http://127.0.0.1:8265: a run joins a cluster itself"),
    ],
)
def test_an_address_that_names_no_cluster(address: str, expected: str, tmp_path: Path) -> None:
    status, said = tokenize(tmp_path, address)
    assert status == 2, said
    assert expected in said.splitlines()[-1]
    assert "Traceback" not in said
