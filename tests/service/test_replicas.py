"""Tests for a service with two engines, and the replacement of its engines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from mindie_mm.device import open_device
from mindie_mm.settings.cgroup import available_cpus
from tests.warm import running_service
from tests.watching import metric, wait_until
from tools import serving
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

KEY = "the-operators-key"
ENGINE = "mindie_mm.engine.process.engine_process"


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object], device: str
) -> Iterator[RunningService]:
    if (num := available_cpus() if device == "cpu" else open_device(device).count()) < 2:
        pytest.skip(f"two engines need two devices; there are {num}")
    folder = tmp_path_factory.mktemp("pair")
    given = settings | {"spool": folder / "spool", "uds": folder / "socket", "grace_s": 60}
    with running_service(
        given | {"replicas": 2, "admin_key": KEY, "api_key": "a-users-key"}, folder / "log"
    ) as running:
        yield running
        keys = {"Authorization": "Bearer a-users-key"}
        wait_until(lambda: httpx2.get(f"{running.url}/shm", headers=keys).json()["blocks"] == 0)
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]
    assert not list((folder / "spool").iterdir()), "request directories are left"


@pytest.fixture
def http(pair: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=pair.url, timeout=300, headers={"Authorization": "Bearer a-users-key"}) as http_client:
        yield http_client


def engines(service: RunningService) -> list[psutil.Process]:
    children = psutil.Process(service.process.pid).children()
    return [child for child in children if ENGINE in child.cmdline()]


def ask(http: Any, image: str, **changes: Any) -> str:
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What is in the image?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16} | changes
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_each_engine_is_counted_and_measured(pair: RunningService, http: Any) -> None:
    assert http.get("/health").json()["engines"] == {"alive": 2, "total": 2}
    assert metric(pair, "processes", process="engine") == 2
    text = http.get("/metrics").text
    for name in ("num_requests_running", "prefix_cache_hits_total", "cache_config_info"):
        for engine in range(2):
            assert any(
                line.startswith(f"mindie_mm:{name}{{") and f'engine="{engine}"' in line for line in text.splitlines()
            )


def test_metrics_of_a_single_engine_have_no_label_for_it(service: RunningService) -> None:
    text = httpx2.get(f"{service.url}/metrics").text
    for name in ("num_requests_running", "prefix_cache_hits_total"):
        assert re.search(rf'^mindie_mm:{name}{{model_name="[^"]*"}} ', text, re.MULTILINE), name
    assert 'engine="' not in text


def test_a_repeated_image_is_encoded_once(pair: RunningService, http: Any, red_square: str) -> None:
    for _ in range(4):
        assert "red square" in ask(http, red_square)
    counts = [
        tuple(metric(pair, f"mm_cache_{kind}_total", engine=str(engine)) for kind in ("queries", "hits"))
        for engine in range(2)
    ]
    assert sorted(counts) == [(0, 0), (4, 3)]


def test_an_engine_of_two_that_dies_loses_no_request_without_output(
    pair: RunningService, http: Any, red_square: str
) -> None:
    endless = {"max_tokens": 200, "ignore_eos": True}
    right = ask(http, red_square, **endless)
    before = engines(pair)
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(ask, http, red_square, **endless) for _ in range(16)]
        both = [partial(metric, pair, "num_requests_running", engine=str(number)) for number in range(2)]
        wait_until(lambda: all(running() for running in both))
        before[0].kill()
        assert [answer.result() for answer in answers] == [right] * 16
    wait_until(lambda: http.get("/health").json()["engines"]["alive"] == 2)
    assert before[1] in engines(pair)


def test_a_request_that_waits_in_an_engine_that_dies_is_not_preprocessed_again(pair: RunningService, http: Any) -> None:
    """`media_remade_total` counts each image that is decoded, or copied from the cache, for a second attempt."""
    images = [data_url(draw_shape("red", (220, 40, 40), "square", x=x)) for x in (0.35, 0.45, 0.5, 0.55)]
    before, remade = engines(pair), metric(pair, "media_remade_total")
    for engine in before:
        engine.suspend()
    try:
        with ThreadPoolExecutor() as threads:
            answers = [threads.submit(ask, http, one) for one in images]
            wait_until(lambda: http.get("/shm").json()["blocks"] == len(answers))
            before[0].kill()
            before[1].resume()
            assert all("red square" in answer.result() for answer in answers)
    finally:
        before[1].resume()
    assert metric(pair, "media_remade_total") == remade
    wait_until(lambda: http.get("/health").json()["engines"]["alive"] == 2)


def test_a_reload_needs_the_admin_key_or_the_unix_socket(pair: RunningService, http: Any, service: Any) -> None:
    before = engines(pair)
    without = httpx2.post(f"{pair.url}/admin/reload")
    assert (without.status_code, without.headers["www-authenticate"]) == (401, "Bearer")
    assert "--admin-key" in without.json()["error"]["message"]
    assert http.post("/admin/reload").status_code == 401, "an API key is no admin key"
    assert http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 401
    refused = httpx2.post(f"{service.url}/admin/reload", headers={"Authorization": f"Bearer {KEY}"})
    assert refused.status_code == 403, "this service has no admin key"
    assert refused.json()["error"]["type"] == "PermissionDeniedError"
    assert engines(pair) == before
    assert KEY not in pair.log.read_text()


@pytest.mark.slow
def test_the_guide_shows_how_to_reload(pair: RunningService) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    page = (Path(__file__).parents[2] / "docs/operate.md").read_text()
    (script,) = [code for code in re.findall(r"(?ms)^```sh\n(.*?)^```$", page) if "admin/reload" in code]
    script = script.replace("/run/mindie_mm/socket", str(pair.log.with_name("socket")))
    script = script.replace("http://127.0.0.1:8000", pair.url).replace("curl ", "curl --silent --fail ")
    before = {engine.pid for engine in engines(pair)}
    subprocess.run(["sh", "-ec", script], env=os.environ | {"ADMIN_KEY": KEY}, check=True, timeout=200)
    assert before.isdisjoint(engine.pid for engine in engines(pair))


def test_a_reload_replaces_both_engines_while_requests_are_answered(
    pair: RunningService, http: Any, red_square: str
) -> None:
    before = {engine.pid for engine in engines(pair)}
    restarts = metric(pair, "process_restarts_total", process="engine")
    with ThreadPoolExecutor() as threads:
        reloading = threads.submit(
            httpx2.post, f"{pair.url}/admin/reload", headers={"Authorization": f"Bearer {KEY}"}, timeout=300
        )
        while not reloading.done():
            assert "red square" in ask(http, red_square)
            assert http.get("/health").status_code == 200
        assert reloading.result().json() == {"reloaded": 2}
    assert not {engine.pid for engine in engines(pair)} & before
    assert metric(pair, "process_restarts_total", process="engine") == restarts


@pytest.mark.slow
def test_sighup_replaces_the_only_engine_of_a_service_without_a_terminal(
    settings: dict[str, object], tmp_path: Path, red_square: str
) -> None:
    """Requests wait for the next engine, as they do if the engine dies."""
    start: Callable[..., Any] = partial(subprocess.Popen, start_new_session=True)
    given = settings | {"spool": tmp_path / "spool", "grace_s": 60, "uds": tmp_path / "socket"}
    with serving.running_service(given, tmp_path / "log", start=start) as running:
        (before,) = engines(running)
        with httpx2.Client(base_url=running.url, timeout=300) as http, ThreadPoolExecutor() as threads:
            answer = threads.submit(ask, http, red_square, max_tokens=300, ignore_eos=True)
            wait_until(lambda: metric(running, "num_requests_running"))
            running.process.send_signal(signal.SIGHUP)
            assert "red square" in answer.result()
            assert "red square" in ask(http, red_square)
            (after,) = engines(running)
            assert after != before
            with httpx2.Client(
                transport=httpx2.HTTPTransport(uds=str(tmp_path / "socket")), base_url="http://localhost", timeout=300
            ) as unix:
                assert unix.post("/admin/reload").json() == {"reloaded": 1}
            wait_until(lambda: running.log.read_text().count("the reload is complete") == 2)
            assert engines(running) != [after]
        assert running.stop() == 0


@pytest.mark.slow
def test_a_reload_that_the_end_of_the_service_interrupts_gets_status_503(
    settings: dict[str, object], tmp_path: Path
) -> None:
    given = settings | {"spool": tmp_path / "spool", "admin_key": KEY}
    with serving.running_service(given, tmp_path / "log") as running, ThreadPoolExecutor() as threads:
        (before,) = engines(running)
        main = psutil.Process(running.process.pid)
        for child in main.children():
            if "mindie_mm.processes.fork_server" in child.cmdline():
                child.suspend()  # so that the next engine does not start before the end of the service
        headers = {"Authorization": f"Bearer {KEY}"}
        reloading = threads.submit(httpx2.post, f"{running.url}/admin/reload", headers=headers, timeout=300)
        wait_until(lambda: not before.is_running())
        assert running.stop() == 0
        answer = reloading.result()
    assert answer.status_code == 503
    assert "stopped before all engines were replaced" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_more_engines_than_processors_are_refused_with_both_numbers(tmp_path: Path) -> None:
    given = {"replicas": 2, "spool": tmp_path / "spool", "device": "cpu"}
    one_cpu: Callable[..., Any] = partial(
        subprocess.Popen, preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    )
    starting = serving.running_service(given, tmp_path / "log", start=one_cpu)
    with pytest.raises(RuntimeError, match="replicas is 2, but the number of CPUs is 1; lower replicas"):
        starting.__enter__()
