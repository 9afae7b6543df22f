"""Tests for a service behind nginx and HAProxy, with the configurations in docs/deploy.md."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.service.conftest import MiB
from tests.watching import metric, wait_until
from tools.serving import RunningService

PAGE = (Path(__file__).parents[2] / "docs/deploy.md").read_text(encoding="utf-8")
NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {configuration}
}}
"""
COMMANDS = {"nginx": ("nginx", "-c"), "haproxy": ("haproxy", "-db", "-f")}


@pytest.fixture(scope="module", params=COMMANDS)
def proxied(
    request: pytest.FixtureRequest, service: RunningService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx2.Client]:
    """Yield a client of a proxy that runs the page's configuration.

    Only the addresses of the service and of the proxy are replaced.
    """
    command = COMMANDS[request.param]
    program = shutil.which(command[0], path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    (configuration,) = re.findall(rf"^```{request.param}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = service.url.removeprefix("http://")
    for original, replacement in (
        ("127.0.0.1:8000", own),
        ("listen 8080", f"listen 127.0.0.1:{port}"),
        (" :8080", f" 127.0.0.1:{port}"),
    ):
        configuration = configuration.replace(original, replacement)
    if request.param == "nginx":
        configuration = NGINX.format(folder=folder, configuration=configuration)
    file = folder / "configuration"
    file.write_text(configuration, encoding="utf-8")
    with (
        (folder / "log").open("w", encoding="utf-8") as log,
        subprocess.Popen([program, *command[1:], file], stdout=log, stderr=log, cwd=folder) as process,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        try:
            wait_until(lambda: process.poll() is not None or is_well(http))
            assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
            yield http
        finally:
            process.terminate()


def is_well(http: httpx2.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx2.ConnectError:
        return False


def test_answers_through_a_proxy_equal_the_answers_of_the_service(
    proxied: httpx2.Client, http: Any, red_square: str
) -> None:
    content = [{"type": "image_url", "image_url": red_square}, {"type": "text", "text": "What is in the image?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    answers = [client.post("/v1/chat/completions", json=body).json()["choices"] for client in (proxied, http)]
    assert answers[0] == answers[1]
    with proxied.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert len(events) > 3
    assert events[-1] == "data: [DONE]"
    long = {"prompt": "a" * (5 * MiB)}
    assert "context length" in proxied.post("/v1/completions", json=long).json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_disconnected_client_aborts_its_request(
    proxied: httpx2.Client, service: RunningService, *, stream: bool
) -> None:
    before = metric(service, "request_success_total", finished_reason="abort")
    context = service.get("/v1/models")["data"][0]["max_model_len"]
    body = {"prompt": "What?", "max_tokens": context - 50, "ignore_eos": True, "stream": stream}
    request = proxied.build_request("POST", "/v1/completions", json=body)
    with socket.create_connection((proxied.base_url.host, proxied.base_url.port)) as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        wait_until(lambda: metric(service, "num_requests_running"))
    wait_until(lambda: metric(service, "request_success_total", finished_reason="abort") == before + 1)
