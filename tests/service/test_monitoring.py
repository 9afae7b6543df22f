"""Tests for docker/monitoring: the alerts with promtool, and the dashboard's queries with Prometheus under load."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.watching import wait_until
from tools.serving import RunningService

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker/monitoring"
RULES = ROOT / "tests/docker/alerts.test.yaml"
ALERTS = [rule["alert"] for rule in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]]
DASHBOARD = json.loads((FOLDER / "dashboards/mindie_mm.json").read_text())
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}
CONFIGURATION = """
scrape_configs:
  - job_name: mindie_mm
    scrape_interval: 1s
    static_configs: [{{targets: ['{target}']}}]
"""
WITHOUT_DATA = {
    "Requests per second, by API key",
    "Requests above the quota, by API key",
    "Tokens per second, by API key",
}
"""Panels without data if the service has no API keys with names."""


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def panels() -> dict[str, list[str]]:
    """Return the queries of each panel by title, as Grafana sends them."""
    queries: dict[str, list[str]] = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            queries.setdefault(panel["title"], []).append(query)
    return queries


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load(RULES.read_text())["tests"]
    assert {alert["alertname"] for test in tests for alert in test["alert_rule_test"]} == set(ALERTS)


def test_panels_do_not_overlap_and_have_distinct_titles() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("check", "rules", FOLDER / "alerts.yaml"), ("test", "rules", RULES)], ids=["check", "test"]
)
def test_the_alerts_fire_in_the_situations_that_they_describe(arguments: tuple[object, ...]) -> None:
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def prometheus(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """Yield a client of a Prometheus that scrapes the service."""
    folder = tmp_path_factory.mktemp("prometheus")
    file = folder / "prometheus.yml"
    file.write_text(CONFIGURATION.format(target=service.url.removeprefix("http://")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([program("prometheus"), *options], stdout=log, stderr=log) as process,
        httpx2.Client(base_url=f"http://{address}", timeout=60) as http,
    ):
        try:
            wait_until(lambda: process.poll() is not None or is_ready(http))
            assert process.poll() is None, (folder / "log").read_text()
            yield http
        finally:
            process.terminate()


def is_ready(http: httpx2.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx2.ConnectError:
        return False


def result(prometheus: httpx2.Client, query: str) -> list[dict[str, Any]]:
    answer = prometheus.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer.get("error"))
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


@pytest.mark.slow
def test_every_query_of_the_dashboard_has_a_result_under_load(
    prometheus: httpx2.Client, http: httpx2.Client, red_square: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": red_square}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 8, "ignore_eos": True}

    def has_more_than(before: float) -> bool:
        return count() > before

    def count() -> float:
        return sum(float(one["value"][1]) for one in result(prometheus, "mindie_mm:request_success_total"))

    with ThreadPoolExecutor() as threads:
        for _ in range(3):  # a rate needs changes between scrapes
            before = count()
            for answer in threads.map(lambda _: http.post("/v1/chat/completions", json=body), range(8)):
                assert answer.status_code == 200
            wait_until(partial(has_more_than, before))
    empty = {title for title, queries in panels().items() if not all(result(prometheus, query) for query in queries)}
    assert empty == WITHOUT_DATA
    (rate,) = result(prometheus, "\n".join(panels()["Tokens per second"][1:]))
    assert float(rate["value"][1]) > 0
    series = set(re.findall(r"mindie_mm:\w+", json.dumps(panels())))
    assert len(series) > 30
