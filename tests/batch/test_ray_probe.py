"""Tests for the probe of a Ray address, against sockets that answer in different ways."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from mindie_mm.processes import ray_probe
from mindie_mm.processes.ray_probe import TOTAL_S, require_grpc
from tests.batch.test_ray_address import SETTINGS_FRAME, answering

GREETINGS = {
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a gRPC server"),
    "a part of a frame": (SETTINGS_FRAME[:4], "did not answer within 1 s"),
    "nothing": (b"", "closed the connection"),
}
"""Answer of the server, and the reason in the error, by case."""


def port_of(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait 1 s for an answer instead of 3 s, in tests where no answer arrives."""
    monkeypatch.setattr(ray_probe, "TIMEOUT_S", 1.0)


@pytest.fixture
def full() -> Iterator[int]:
    """Yield a port that answers no attempt to connect, because its backlog is full."""
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        waiting = []
        for _ in range(4):
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
            waiting.append(client)
        yield port_of(server)


def test_a_grpc_server_is_accepted():
    with answering(SETTINGS_FRAME) as port:
        require_grpc("127.0.0.1", port)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", GREETINGS)
def test_a_server_that_does_not_greet_as_grpc_is_refused_with_the_reason(name):
    greeting, reason = GREETINGS[name]
    with answering(greeting) as port, pytest.raises(ConnectionError) as error:
        require_grpc("127.0.0.1", port)
    assert f" {reason}" in str(error.value)


def test_a_closed_port_is_refused_with_every_address():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = port_of(server)
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port} failed \(Connection refused\)"):
        require_grpc("localhost", port)


@pytest.mark.usefixtures("impatient")
def test_an_address_that_drops_packets_is_refused_within_the_limit(full):
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{full} did not answer within 1 s"):
        require_grpc("127.0.0.1", full)
    assert time.monotonic() - begin < 2 * TOTAL_S


@pytest.mark.usefixtures("impatient")
def test_a_silent_server_is_accepted_over_tls_only():
    """The greeting of a server with TLS cannot be read."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        require_grpc("127.0.0.1", port_of(server), tls=True)
        with pytest.raises(ConnectionError, match="did not answer"):
            require_grpc("127.0.0.1", port_of(server))


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 70])
def test_a_name_without_address_is_refused(host):
    with pytest.raises(ConnectionError, match=f"{host} cannot be resolved"):
        require_grpc(host, 6379)
