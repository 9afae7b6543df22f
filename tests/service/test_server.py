"""Tests for how a service starts and stops. It leaves nothing in shared memory, no matter how it ends."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint.hub import checkpoint_name
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.shm import collect, request_directory
from service.server import _Server, bound
from tests.warm import running_service
from tests.watching import metric, wait_until
from tools.serving import RunningService

ENGINE = "mindie_mm.engine.process.engine_process"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (".", "qwen"),
        ("../qwen/", "qwen"),
        ("../latest", "latest"),
        ("..", "models"),
        ("/hub/models--Qwen--Qwen2-VL-2B/snapshots/895c3a49", "Qwen/Qwen2-VL-2B"),
        ("/hub/models--gpt2/snapshots/607a30d7/", "gpt2"),
        ("/runs/snapshots/12", "12"),
    ],
)
def test_a_checkpoint_is_named_after_its_folder_or_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, name: str
) -> None:
    (tmp_path / "models/qwen").mkdir(parents=True)
    (tmp_path / "models/latest").symlink_to("qwen")
    monkeypatch.chdir(tmp_path / "models/qwen")
    assert checkpoint_name(Path(given)) == name


def start_endless_stream(service: RunningService, red_square: str) -> socket.socket:
    """Start a long stream with eight choices, wait for its status line, and return the connection."""
    return start_stream(service, red_square, service.get("/v1/models")["data"][0]["max_model_len"] // 2, n=8)


def start_stream(service: RunningService, red_square: str, max_tokens: int, n: int = 1) -> socket.socket:
    """Start a stream, wait for its status line, and return the connection."""
    connection = connect(service)
    connection.sendall(head_and_body(chat_body(red_square, max_tokens, n) | {"stream": True}))
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def chat_body(red_square: str, max_tokens: int, n: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"image": red_square}, {"text": "What?"}]}]
    return {"messages": messages, "max_tokens": max_tokens, "n": n, "ignore_eos": True}


def connect(service: RunningService) -> socket.socket:
    host = urlsplit(service.url)
    assert host.hostname is not None
    return socket.create_connection((host.hostname, host.port or 80), timeout=300)


def head_and_body(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def wait_until_gone(arenas: list[str], timeout_s: float = 60) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while (left := [name for name in arenas if Path("/dev/shm", name).exists()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def arena_names(shm: dict[str, Any]) -> list[str]:
    arenas = [arena["name"] for arena in shm["arenas"]]
    assert arenas
    return arenas


def test_sigterm_ends_running_requests_and_frees_everything(
    settings: dict[str, object], tmp_path: Path, red_square: str
) -> None:
    """A stream that has started ends with an error event, and a whole answer becomes 503."""
    spool = tmp_path / "spool"
    with running_service(settings | {"spool": spool}, tmp_path / "log") as service:
        limit = service.get("/v1/models")["data"][0]["max_model_len"]
        with connect(service) as whole, start_endless_stream(service, red_square) as connection:
            arenas = arena_names(service.shm())
            whole.sendall(head_and_body(chat_body(red_square, limit // 2, 8)))
            wait_until(lambda: metric(service, "num_requests_running") == 16)
            service.process.send_signal(signal.SIGTERM)
            rest = read_all(connection)
            head, _, body = read_all(whole).partition(b"\r\n\r\n")
        assert service.process.wait(300) == 0
    assert b"the service stopped before the request was finished" in rest
    assert b"data: [DONE]" in rest
    assert head.startswith(b"HTTP/1.1 503")
    error = json.loads(body)["error"]
    assert error["message"] == "the service stopped before the request was finished"
    assert error["type"] == "ServiceUnavailableError"
    assert wait_until_gone(arenas, 0) == []
    assert list(spool.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_running_requests_are_finished_within_the_grace_time(
    settings: dict[str, object], tmp_path: Path, red_square: str, number: signal.Signals
) -> None:
    with running_service(settings | {"spool": tmp_path / "spool", "grace_s": 60}, tmp_path / "log") as service:
        with start_stream(service, red_square, max_tokens=200) as connection:
            arenas = arena_names(service.shm())
            service.process.send_signal(number)
            rest = read_all(connection)
        assert service.process.wait(300) == 0
    assert rest.count(b'"finish_reason":"length"') == 1
    assert b"error" not in rest
    assert b"data: [DONE]" in rest
    assert wait_until_gone(arenas, 0) == []
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_stopping_service_is_live_but_not_ready_and_closes_connections_until_a_second_signal(
    settings: dict[str, object], tmp_path: Path, red_square: str
) -> None:
    """It closes idle connections at once, and others after their answers.

    Clients with keep-alive then reconnect, and reach another service at the same address. The second signal ends the
    grace time.
    """
    with running_service(settings | {"spool": tmp_path / "spool", "grace_s": 600}, tmp_path / "log") as service:
        asking = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with (
            start_endless_stream(service, red_square) as stream,
            connect(service) as at_rest,
            connect(service) as fresh,
            connect(service) as halfway,
        ):
            arenas = arena_names(service.shm())
            halfway.sendall(asking[:9])
            at_rest.sendall(asking)
            assert at_rest.recv(12) == b"HTTP/1.1 200"
            service.process.send_signal(signal.SIGTERM)
            read_all(at_rest)
            fresh.sendall(asking)
            halfway.sendall(asking[9:])
            for connection in (fresh, halfway):
                head, _, body = read_all(connection).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503")
                assert b"connection: close" in head.split(b"\r\n")
                assert b"the service is stopping" in body
            while (answer := httpx2.get(f"{service.url}/health")).status_code == 200:  # signal not handled yet
                time.sleep(0.01)
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the service is stopping"
            live = httpx2.get(f"{service.url}/health/live")
            assert (live.status_code, live.headers["connection"]) == (200, "close")
            assert httpx2.get(f"{service.url}/metrics").status_code == 200
            refused = httpx2.post(f"{service.url}/v1/chat/completions", json=chat_body(red_square, 1, 1))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["message"] == "the service is stopping"
            service.process.send_signal(signal.SIGTERM)
            rest = read_all(stream)
        assert service.process.wait(300) == 0
    assert b"the service stopped before the request was finished" in rest
    assert wait_until_gone(arenas, 0) == []
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.slow
def test_slow_clients_do_not_delay_the_stop(settings: dict[str, object], tmp_path: Path, red_square: str) -> None:
    with (
        running_service(settings | {"spool": tmp_path / "spool"}, tmp_path / "log") as service,
        connect(service) as writer,
        start_endless_stream(service, red_square),
    ):
        writer.sendall(head_and_body(chat_body(red_square, 1, 1))[:-1])
        service.get("/health")  # the service answers after it has read the partial body
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(300) == 0
    assert list((tmp_path / "spool").iterdir()) == []


@contextlib.contextmanager
def loading_service(
    settings: dict[str, object], log: Path, stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a service, wait until its child processes have started, and yield its process while it is loading."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [str(Path(sys.executable).with_name("mindie-mm")), "serve", "--port=0", *flags]
    with log.open("w", encoding="utf-8") as errors, subprocess.Popen(command, stdout=stdout, stderr=errors) as process:
        try:
            deadline = time.monotonic() + 60
            while len(psutil.Process(process.pid).children()) < 2:
                assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
                time.sleep(0.005)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGINT], *(pytest.param([signal.SIGTERM] * n, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_a_signal_while_loading_ends_the_service_and_its_processes(
    settings: dict[str, object], tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    with loading_service(settings | {"spool": tmp_path / "spool"}, tmp_path / "log") as process:
        children = psutil.Process(process.pid).children()
        for number in numbers:
            process.send_signal(number)
        assert process.wait(300) == 0, (tmp_path / "log").read_text()[-2000:]
        assert process.stdout is not None
        assert process.stdout.read() == b"", "it was never ready"
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("logged", [False, True], ids=["reading settings", "importing"])
def test_a_signal_before_loading_ends_the_service(tmp_path: Path, number: signal.Signals, logged: bool) -> None:
    """Process 1 of a container ignores signals without a handler, so handlers are installed before slow imports."""
    command = [str(Path(sys.executable).with_name("mindie-mm")), "serve", "--port=0", f"--spool={tmp_path / 'spool'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            first = process.stderr.readline() if logged else b""
            deadline = time.monotonic() + 60
            while not handles(process.pid, signal.SIGTERM):
                assert not logged, "the first record is from behind it"
                assert time.monotonic() < deadline
                time.sleep(0.001)
            process.send_signal(number)
            printed, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert (process.returncode, printed) == (0, b""), first + errors
    if not logged:  # after the first record, a busy machine may deliver the signal late
        assert errors == b""
        assert not (tmp_path / "spool").exists()


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether the process `pid` has a handler for the signal `number`."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (number - 1) & 1)


def metrics(service: RunningService) -> dict[tuple[str, str], float]:
    """Return the values of the metrics that have a label `process`, by metric name and process."""
    text = httpx2.get(f"{service.url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (one.name.removeprefix("mindie_mm:"), one.labels["process"]): one.value
        for one in samples
        if "process" in one.labels
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "module"), [("tokenizer", "mindie_mm.tokenize.stage.tokenizer_process"), ("engine", ENGINE)]
)
def test_a_process_that_dies_repeatedly_is_restarted_with_backoff_while_the_service_is_not_ready(
    settings: dict[str, object], tmp_path: Path, role: str, module: str
) -> None:
    with running_service(settings | {"spool": tmp_path / "spool"}, tmp_path / "log") as service:
        assert metrics(service)["processes", role] == 1
        killed: set[int] = set()
        enough = threading.Event()

        def kill_each() -> None:
            """Kill the first four processes of this role as soon as they start, before they can answer."""
            while len(killed) < 4:
                for child in psutil.Process(service.process.pid).children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if child.pid not in killed and module in child.cmdline():
                            child.kill()
                            killed.add(child.pid)
                time.sleep(0.005)
            enough.set()

        killer = threading.Thread(target=kill_each)
        killer.start()
        while httpx2.get(f"{service.url}/health").status_code == 200:
            time.sleep(0.01)
        unready = httpx2.get(f"{service.url}/health")
        assert unready.status_code == 503
        assert role in unready.json()["error"]["message"]
        assert httpx2.get(f"{service.url}/health/live").status_code == 200
        assert metrics(service)["processes", role] == 0
        assert enough.wait(300)
        killer.join()
        body = {"prompt": "What?", "max_tokens": 1}
        answer = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=300)  # waits for the restart
        assert answer.status_code == 200
        assert httpx2.get(f"{service.url}/health").status_code == 200
        counted = metrics(service)
        assert (counted["processes", role], counted["process_restarts_total", role]) == (1, 1)
        assert counted["process_start_failures_total", role] == 3
        assert service.stop() == 0
    log = (tmp_path / "log").read_text()
    for pause_s in ("0.5", "1.0", "2.0"):
        assert f"{role} process will be restarted in {pause_s} s" in log
    assert "was restarted (restart 1)" in log


def test_the_next_service_cleans_up_after_a_killed_service(
    settings: dict[str, object], tmp_path: Path, red_square: str
) -> None:
    spool = tmp_path / "spool"
    with (
        running_service(settings | {"spool": spool}, tmp_path / "log") as killed,
        start_endless_stream(killed, red_square),
    ):
        arenas = arena_names(killed.shm())
        killed.process.kill()
        killed.process.wait()
    (left,) = spool.iterdir()
    with (
        request_directory(spool) as living,
        running_service(settings | {"spool": spool}, tmp_path / "log2") as service,
    ):
        assert not left.exists()
        assert living.path_file.exists(), "another living service may use the same spool"
        assert service.shm()["blocks"] == 0
        collect()
        assert wait_until_gone(arenas) == []
        assert service.stop() == 0


def test_a_port_in_use_is_refused(settings: dict[str, object], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}"),
            running_service(settings | {"port": port, "spool": tmp_path}, tmp_path / "log"),
        ):
            pytest.fail("started")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert isinstance(port, int)
        return port


def test_a_second_service_on_one_port_does_not_load(settings: dict[str, object], tmp_path: Path) -> None:
    with bound(ServiceConfig(port=free_port())) as (first,):
        port = first.getsockname()[1]
        with (
            pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            running_service(settings | {"port": port, "spool": tmp_path}, tmp_path / "log"),
        ):
            pytest.fail("started")
    assert "loading" not in (tmp_path / "log").read_text()
    with bound(ServiceConfig(port=port)):
        pass


def test_the_log_says_once_that_nohup_makes_the_service_ignore_sighup(tmp_path: Path) -> None:
    """The port is in use, so the service ends before it loads a model."""
    with bound(ServiceConfig(port=free_port())) as (taken,):
        command = [str(Path(sys.executable).with_name("mindie-mm")), "serve", f"--port={taken.getsockname()[1]}"]
        ended = subprocess.run(
            ["nohup", *command, f"--spool={tmp_path}"], check=False, capture_output=True, text=True, timeout=300
        )
    assert ended.returncode == 1
    assert ended.stderr.count("SIGHUP is ignored, because the service was started with nohup") == 1, ended.stderr


@pytest.mark.slow
def test_a_port_taken_while_loading_ends_the_service(settings: dict[str, object], tmp_path: Path) -> None:
    port = free_port()
    with (
        loading_service(settings | {"port": port, "spool": tmp_path / "spool"}, tmp_path / "log") as process,
        socket.create_server(("127.0.0.1", port)),
    ):
        assert process.wait(300) == 1
    log = (tmp_path / "log").read_text()
    assert log.endswith(f"Error: cannot listen on 127.0.0.1:{port}: Address already in use\n")
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_closed_standard_output_does_not_stop_the_service(settings: dict[str, object], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    log = tmp_path / "log"
    with loading_service(settings | {"spool": tmp_path / "spool"}, log, stdout=write) as process:
        os.close(write)
        deadline = time.monotonic() + 60
        while not (found := re.search(r"WARNING.* mindie_mm serves tiny at (\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert httpx2.get(f"{found[1]}/health/live").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, log.read_text()
    logged = log.read_text()
    assert "Traceback" not in logged
    assert "ignored" not in logged


def test_a_folder_of_data_is_refused_as_spool(settings: dict[str, object], tmp_path: Path) -> None:
    """The subfolders look like directories of dead requests, so the service would remove them."""
    (tmp_path / "a" / "image").mkdir(parents=True)
    (tmp_path / "a" / "shm_name.txt").touch()
    with (
        pytest.raises(RuntimeError, match=f"{tmp_path / 'a'} is not a request directory, .*is therefore not a spool"),
        running_service(settings | {"spool": tmp_path}, tmp_path / "log"),
    ):
        pytest.fail("started")
    assert (tmp_path / "a" / "image").is_dir()


def test_other_errors_are_not_reported_as_failure_to_listen() -> None:
    with pytest.raises(FileNotFoundError), bound(ServiceConfig(port=0)):
        raise FileNotFoundError("a worker's")


def test_zero_concurrent_fetches_are_refused() -> None:
    with pytest.raises(InputError, match="max_concurrent_fetches=0 must be an integer of at least 1"):
        ServiceConfig(max_concurrent_fetches=0)


def test_no_websocket_library_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, uvicorn imports a WebSocket library if one is installed."""
    (tmp_path / "websockets.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "uvicorn.protocols.websockets.auto", raising=False)
    config = _Server(FastAPI(), ServiceConfig()).config
    config.load()
    assert config.ws_protocol_class is None
