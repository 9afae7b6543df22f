"""Tests for `mindie-mm render --workers`: processes that share a port and the plans of media."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tools.demo import draw_shape, encode
from tools.serving import RunningService, running_service

RENDER = "/v1/chat/completions/render"
CLI = Path(sys.executable).with_name("mindie-mm")
KEYS = "0123456789abcdef", "fedcba9876543210"


class Files(BaseHTTPRequestHandler):
    """A server of one image, which can be exchanged."""

    data = b""
    fetched = 0

    def do_GET(self) -> None:
        type(self).fetched += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.end_headers()
        self.wfile.write(self.data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def file_server() -> Iterator[str]:
    Files.data, Files.fetched = encode(draw_shape("red", (220, 40, 40), "square", x=0.4), "PNG"), 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/image.png"
        server.shutdown()


def render(service: RunningService, url: str | None, key: str = KEYS[0], **part: Any) -> httpx2.Response:
    """Render a chat over a connection of its own, which any worker may accept."""
    image = {"type": "image_url", "image_url": {"url": url}, **part}
    body = {"mm_payload": "none", "messages": [{"role": "user", "content": [image]}]}
    with httpx2.Client(base_url=service.url, timeout=120, headers={"Authorization": f"Bearer {key}"}) as client:
        return client.post(RENDER, json=body)


def workers(service: RunningService) -> list[psutil.Process]:
    children = psutil.Process(service.process.pid).children()
    return [child for child in children if "service.workers.render_worker_process" in child.cmdline()]


def counted(service: RunningService, name: str) -> dict[str, float]:
    """Return the values of a counter by worker."""
    with httpx2.Client(base_url=service.url, timeout=120) as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
        found: dict[str, float] = {}
        for family in families:
            for one in family.samples:
                if one.name == f"mindie_mm:{name}":
                    found[one.labels["worker"]] = found.get(one.labels["worker"], 0.0) + one.value
    return found


@pytest.mark.slow
def test_workers_share_a_port_and_plans_and_survive_each_other(tmp_path: Path) -> None:
    settings = {
        "workers": 2,
        "decoders": 1,
        "max_model_len": 2048,
        "allow_private_media": True,
        "spool": tmp_path / "spool",
        "plan_url_s": 600,
    }
    environment = {"MINDIE_MM_API_KEY": ",".join(KEYS)}
    before = {*Path("/dev/shm").iterdir()}
    with (
        file_server() as url,
        running_service(settings, tmp_path / "log", environment=environment, command="render") as service,
    ):
        assert service.announcement.rstrip().endswith(" with 2 workers")
        answers = [render(service, url, uuid="name") for _ in range(12)]
        assert [answer.status_code for answer in answers] == [200] * 12, answers[0].text
        asked = counted(service, "plan_cache_queries_total")
        assert (asked.keys(), sum(asked.values())) == ({"0", "1"}, 12)
        assert sum(counted(service, "plan_cache_hits_total").values()) == 12 - Files.fetched
        assert 1 <= Files.fetched <= 2, "only the first requests fetch"
        prompts = [(answer.json()["token_ids"], answer.json()["features"]) for answer in answers]
        assert prompts == prompts[:1] * 12

        fetched = Files.fetched
        Files.data = encode(draw_shape("green", (40, 160, 60), "star", x=0.5), "PNG")
        assert render(service, None, uuid="name").json()["features"] == prompts[0][1], "any worker knows the uuid"
        assert render(service, url, uuid="name").json()["features"] == prompts[0][1], "URLs may change later"
        assert Files.fetched == fetched
        other = render(service, url, KEYS[1])
        assert (other.status_code, Files.fetched) == (200, fetched + 1), "another key fetches for itself"
        assert other.json()["features"]["mm_hashes"] != prompts[0][1]["mm_hashes"]
        assert render(service, None, KEYS[1], uuid="name").status_code == 400

        dead, living = workers(service)
        os.kill(dead.pid, signal.SIGKILL)
        for _ in range(8):
            assert render(service, url, uuid="name").json()["features"] == prompts[0][1]
        deadline = time.monotonic() + 240
        while "was restarted (restart 1)" not in service.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (len(workers(service)), living in workers(service)) == (2, True), service.log.read_text()[-2000:]
        assert counted(service, "plan_cache_queries_total").keys() == {"0", "1"}

        processes = psutil.Process(service.process.pid).children(recursive=True)
        service.process.kill()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
        while {*Path("/dev/shm").iterdir()} - before and time.monotonic() < deadline:
            time.sleep(0.05)
    assert {*Path("/dev/shm").iterdir()} <= before


def test_quotas_of_keys_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[team]\nkey = "0123456789abcdef"\n')
    command = [CLI, "render", "--workers=2", "--port=0", f"--api-key-file={keys}"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode != 0, "each would count the quotas of its keys" in ended.stderr) == (True, True)
