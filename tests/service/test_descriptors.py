"""Tests for the service when it reaches its limit of open files."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path
from typing import Any

import httpx2

from tests.watching import wait_until
from tools.serving import RunningService

IDLE = 80


def is_refused(connection: socket.socket) -> bool:
    """Return whether the service has answered 503. Return False if it has reset the connection or not answered yet."""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        return connection.recv(12, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"HTTP/1.1 503"
    return False


def warnings(service: RunningService) -> list[str]:
    """Return the log lines that warn about descriptors."""
    return [line for line in service.log.read_text().splitlines() if "descriptors (open files) are in use" in line]


def test_more_connections_than_descriptors_are_refused_and_logged(service: RunningService, http: Any) -> None:
    pid = service.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = len(list(Path(f"/proc/{pid}/fd").iterdir())) + IDLE // 2
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    address = http.base_url.host, http.base_url.port
    try:
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(address)) for _ in range(IDLE)]
            wait_until(lambda: any(map(is_refused, idle)))
            wait_until(lambda: warnings(service))
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    (line,) = warnings(service)
    assert f" of at most {limit} descriptors" in line
    assert "LimitNOFILE=" in line

    def answers() -> bool:
        with contextlib.suppress(httpx2.TransportError):  # libuv may still reset connections
            return httpx2.get(f"{service.url}/health").status_code == 200
        return False

    wait_until(answers)
