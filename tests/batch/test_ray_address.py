"""Tests for addresses where no Ray cluster answers. The run ends soon, and the error names the address and reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mindie_mm.errors import InputError
from mindie_mm.processes.ray_cluster import join

pytest.importorskip("ray")

CLI = Path(sys.executable).with_name("mindie-mm")
LIMIT_S = 240
"""Time limit of a run in these tests. Ray's own limit is more than 8 minutes."""
IMPORTED = "import ray; from mindie_mm.processes.ray_cluster import join; join('127.0.0.1:1', 'ray')"
"""Script that imports Ray before mindie_mm. Ray reads its time limits when it is imported."""

JOINED = "cannot join a Ray cluster at "
OTHER = ": mindie-mm joins the cluster directly, not through a Ray client. Give the host and port"
CASES: Mapping[str, tuple[str, Mapping[str, str], str]] = {
    "closed": ("{closed}", {}, JOINED + "{closed}: Failed to connect"),
    "silent": ("{silent}", {}, JOINED + "{silent}: Failed to connect"),
    "web server": ("{web}", {}, JOINED + "{web}: Failed to connect"),
    "unknown name": ("nowhere.invalid:6379", {}, JOINED + "nowhere.invalid:6379: Failed to connect"),
    "IPv6": ("[::1]:1", {}, JOINED + "[::1]:1: Failed to connect"),
    "no port": ("127.0.0.1", {}, JOINED + "127.0.0.1: Invalid address format"),
    "auto": ("auto", {"RAY_ADDRESS": "127.0.0.1:1"}, JOINED + "127.0.0.1:1 (from RAY_ADDRESS): Failed"),
    "no token": ("{greeting}", {"RAY_AUTH_MODE": "token", "HOME": "/nowhere"}, "no authentication token was found"),
}
"""Address, environment variables, and text that the last line of the output must contain, by case."""
COMMON = ("closed", "no port", "no token")
"""One case for each kind of error that Ray raises. The other cases run only in the slow suite.

Each case takes seconds, because its process imports Ray.
"""


SETTINGS_FRAME = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""First bytes that a gRPC server sends."""


@contextmanager
def answering(greeting: bytes) -> Iterator[int]:
    """Yield the port of a server that sends `greeting` to all clients, or closes their connections if it is empty."""

    def serve() -> None:
        with ExitStack() as clients, suppress(OSError):  # the server is shut down
            while True:
                client, _ = server.accept()
                clients.enter_context(client)
                client.settimeout(10)
                client.recv(4096)  # unread bytes would turn the close into a reset
                client.sendall(greeting)
                if not greeting:
                    client.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture(scope="module")
def places() -> Iterator[Mapping[str, str]]:
    with ExitStack() as open_ones:
        with socket.create_server(("127.0.0.1", 0)) as server:
            closed = server.getsockname()[1]
        silent = open_ones.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        web = open_ones.enter_context(HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler))
        serving = threading.Thread(target=web.serve_forever)
        serving.start()
        open_ones.callback(serving.join)
        open_ones.callback(web.shutdown)
        greeting = open_ones.enter_context(answering(SETTINGS_FRAME))
        ports = {"closed": closed, "silent": silent, "web": web.server_port, "greeting": greeting}
        yield {name: f"127.0.0.1:{port}" for name, port in ports.items()}


@pytest.fixture(scope="module")
def processes(
    places: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Mapping[str, subprocess.Popen[str]]]:
    """Start the processes of all selected cases at the same time, because each process waits for some seconds."""
    function = test_an_address_without_a_cluster_ends_the_run_with_the_reason
    items = (item for item in request.session.items if getattr(item, "function", None) is function)
    wanted = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("addresses")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    started: dict[str, subprocess.Popen[str]] = {}
    with ExitStack() as running:
        for name in wanted:
            address, variables, _ = CASES[name]
            output = str(folder / f"run {name}")
            command = [str(CLI), "tokenize", str(folder / "rows.jsonl"), "--output", output, "--ray"]
            started[name] = running.enter_context(
                subprocess.Popen(
                    [*command, address.format(**places)],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**own, **variables},
                )
            )
            running.callback(started[name].kill)
        yield started


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COMMON else pytest.mark.slow) for name in CASES]
)
def test_an_address_without_a_cluster_ends_the_run_with_the_reason(
    name: str, processes: Mapping[str, subprocess.Popen[str]], places: Mapping[str, str]
) -> None:
    _, message = processes[name].communicate(timeout=LIMIT_S)
    assert processes[name].returncode == 2, message
    assert CASES[name][2].format(**places) in message.splitlines()[-1]
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("address", "variable", "message"),
    [
        ("ray://127.0.0.1:10001", "", "--ray ray://127.0.0.1:10001"),
        ("http://127.0.0.1:8265", "", "--ray http://127.0.0.1:8265"),
        ("auto", "ray://a:1", "--ray ray://a:1 (from RAY_ADDRESS)"),
    ],
)
def test_an_address_of_another_interface_is_refused(
    address: str, variable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(InputError) as error:
        join(address, "ray")
    assert str(error.value).startswith(message + OTHER)


@pytest.mark.slow
def test_a_process_that_has_imported_ray_does_not_wait_longer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert f"InputError: {JOINED}127.0.0.1:1: Failed to connect" in done.stderr.splitlines()[-1]
