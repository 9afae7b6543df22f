"""Tests that the settings and metrics in the guides exist, and that the example files are valid."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mindie_mm.cli import main
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.settings.sources import CLASSES, PARTS, configuration
from service.http.clients import Clients
from service.http.page import PATHS as page_paths  # noqa: N811
from tools.serving import RunningService

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = (
    "quickstart",
    "serve",
    "python",
    "batch",
    "deploy",
    "operate",
    "scale",
    "monitoring",
    "security",
    "npu",
    "migrate",
)
PAGE = "\n".join((DOCS / f"{name}.md").read_text() for name in GUIDES)
ALERTS = (DOCS.parent / "docker/monitoring/alerts.yaml").read_text()
OTHERS = {
    *(
        "--cpus",
        "--shm-size",
        "--ipc",
        "--stop-timeout",
        "--init",
        "--tmpfs",
        "--publish",
        "--volume",
        "--env",
        "--tag",
        "--file",
    ),
    *("--read-only", "--cap-drop", "--device", "--gpus", "--group-add", "--build-arg", "--profile", "--build"),
    *("--exclude", "--local-dir", "--set", "--from-literal", "--index-url", "--help", "--unix-socket"),
    *(
        "--now",
        "--sort",
        "--cpu-list",
        "--no-buffer",
        "--retry",
        "--retry-delay",
        "--retry-connrefused",
        "--silent",
        "--filename",
    ),
}
"""Options of docker, kubectl, helm, hf, pip, click, curl, systemctl, tar and taskset."""
VLLM = {
    *("num_requests_running", "num_requests_waiting", "num_preemptions_total", "kv_cache_usage_perc"),
    *("cache_config_info", "prefix_cache_queries_total", "prefix_cache_hits_total", "mm_cache_queries_total"),
    *("mm_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket"),
    *("request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_params_n_bucket"),
    *(
        "request_max_num_generation_tokens_bucket",
        "request_params_max_tokens_bucket",
        "admission_rejections_total",
        "http_requests_total",
    ),
    "process_resident_memory_bytes",
}
"""Names of vLLM 0.32's metrics that this service also has, with the same meaning."""


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from parameter.opts
        yield from parameter.secondary_opts
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from options(subcommand)


def commands(text: str) -> list[list[str]]:
    """Return the arguments of each command `mindie-mm` in a block of shell code."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("mindie-mm ")]


@pytest.mark.parametrize("arguments", [one for text in fenced("sh") for one in commands(text)], ids=" ".join)
def test_every_documented_command_has_the_arguments_that_it_takes(arguments: list[str]) -> None:
    command: click.Command = main
    while isinstance(command, click.Group):
        name, *arguments = arguments
        if name.startswith("--"):
            return
        found = command.get_command(click.Context(command), name)
        assert found is not None, name
        command = found
    context = click.Context(command, info_name=command.name)
    _, left, _ = command.make_parser(context).parse_args(arguments)
    assert left == []


@pytest.mark.parametrize("script", fenced("sh"), ids=lambda script: script.partition("\n")[0])
def test_shell_code_parses_and_names_only_things_that_exist(script: str) -> None:
    """Commands with Docker, Kubernetes, systemd, MindIE or a device are only parsed, because a test has none of them.

    `tests/docker` checks the files that they use, and `tests/batch/test_remote_page.py` runs commands for S3 and Ray.
    """
    ended = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False, timeout=60)
    assert not ended.stderr
    root = DOCS.parent
    for path in re.findall(r"(?<![\w/:])(?:docker|examples|docs|tools)/[\w/.-]+", script):
        assert (root / path).exists(), path
    for module in re.findall(r"python -m ((?:tools|bench|mindie_mm)[\w.]*)", script):
        assert importlib.util.find_spec(module) is not None, module
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[([\w-]+)\]'", script)) <= extras.keys()
    services = yaml.safe_load((root / "docker/compose.yaml").read_text())["services"].values()
    assert set(re.findall(r"--profile (\w+)", script)) <= {one for service in services for one in service["profiles"]}


def test_the_documented_keys_file_is_valid(tmp_path: Path) -> None:
    (text,) = [one for one in fenced("toml") if "requests_per_minute" in one]
    first, second = text.replace('key = "..."', 'key = "one"', 1).replace('key = "..."', 'key = "two"').split("\n\n")
    file = tmp_path / "keys.toml"
    file.write_text(f"{first}\n\n{second}")
    client = Clients(ServiceConfig(api_key_file=file)).find(sha256(b"two").digest())
    assert client is not None
    assert client.name == "alice@example.org"


def test_the_documented_scrape_configuration_has_the_address_of_the_service() -> None:
    (text,) = [one for one in fenced("yaml") if "scrape_configs" in one]
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{ServiceConfig().host}:{ServiceConfig().port}"]}]


def test_the_documented_part_of_the_serve_config_is_in_its_file() -> None:
    (text,) = [one for one in fenced("yaml") if "max_replicas" in one]
    (application,) = yaml.safe_load((DOCS.parent / "docker/ray/serve.yaml").read_text())["applications"]
    shown, whole = yaml.safe_load(text)["args"], application["args"]
    assert shown["settings"].items() <= whole["settings"].items()
    assert {**shown, "settings": {}}.items() <= {**whole, "settings": {}}.items()


def test_the_documented_health_and_number_of_engines_have_the_form_of_a_real_service(
    service: RunningService, http: Any
) -> None:
    (text,) = [one for one in fenced("json") if '"shared_memory"' in one]
    shown, health = json.loads(text), service.get("/health")
    assert (shown.keys(), shown["engines"].keys()) == (health.keys(), health["engines"].keys())
    assert shown["shared_memory"]["arenas"][0].keys() == health["shared_memory"]["arenas"][0].keys()
    (text,) = [one for one in fenced("text") if "# HELP mindie_mm:processes" in one]
    metrics = re.sub('model_name="[^"]*"', "", http.get("/metrics").text)
    for line in re.sub('model_name="[^"]*"', "", text).splitlines():
        assert line.rpartition(" ")[0] in metrics


def test_every_documented_option_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert named - set(options(main)) - OTHERS == set()


def test_every_documented_variable_exists() -> None:
    fields = {field.name for cls in CLASSES for field in dataclasses.fields(cls)} - PARTS
    variables = {f"MINDIE_MM_{name.upper()}" for name in fields} | {"MINDIE_MM_CONFIG"}
    assert set(re.findall(r"MINDIE_MM_\w+", PAGE)) <= variables


def test_the_documented_settings_file_is_valid(tmp_path: Path) -> None:
    (text,) = [one for one in fenced("toml") if "served_model_name" in one]
    file = tmp_path / "settings.toml"
    file.write_text(text)
    loaded = configuration({}, file)
    assert loaded.service.grace_s == 20
    assert loaded.worker.arena_bytes == 512 << 20
    assert len(loaded.origins) == len(re.findall("^[a-z_]+ =", text, re.MULTILINE))


def test_the_documented_systemd_unit_is_valid(tmp_path: Path) -> None:
    (text,) = fenced("ini")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    program = Path(sys.executable).with_name("mindie-mm")
    unit = tmp_path / "mindie_mm.service"
    unit.write_text(text.replace("/opt/mindie_mm/.venv/bin/mindie-mm", str(program)).replace("=mindie\n", "=root\n"))
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "mindie_mm.service" not in ended.stderr, "a line that systemd ignores is told of"


def metric_names(http: Any) -> set[str]:
    """Return the names of all samples and metric families, without the prefix `mindie_mm:`."""
    http.post("/v1/completions", json={"prompt": "What?", "max_tokens": 3, "ignore_eos": True}).raise_for_status()
    names: set[str] = set()
    for family in text_string_to_metric_families(http.get("/metrics").text):
        names |= {family.name, *(sample.name for sample in family.samples)}
        names |= (
            {f"{family.name}_total"} if family.type == "counter" else set()
        )  # without API keys, some have no sample
    return {name.removeprefix("mindie_mm:") for name in names}


def test_every_documented_metric_exists(http: Any) -> None:
    section = PAGE.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    named |= set(re.findall(r"`(process_\w+)`, `|`(process_\w+)` and", section)[0]) - {""}
    assert len(named) > 40
    assert named - metric_names(http) == set()


def test_the_alerts_use_existing_metrics(http: Any) -> None:
    (group,) = yaml.safe_load(ALERTS)["groups"]
    exist = metric_names(http)
    for rule in group["rules"]:
        named = re.findall(r"mindie_mm:(\w+)", rule["expr"])
        assert named
        assert set(named) <= exist, rule
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_error_alert_ignores_probes_scrapes_and_the_web_page(service: RunningService) -> None:
    """Probes, scrapes and the web page succeed so often that they would hide failures of other requests."""
    (expr,) = re.findall(r"alert: MindieMmErrors\n +expr: (.*)", ALERTS)
    left_out, again = re.findall(r'handler!~"([^"]*)"', expr)
    assert left_out == again
    pages = {"/", "/docs"}
    page = pages | {path.replace(path.rpartition("/")[2], "{name}") for path in {*page_paths} - pages}
    paths = service.get("/openapi.json")["paths"]
    assert {path for path in {*paths, *page} if re.fullmatch(left_out, path)} == {
        *(
            "/health",
            "/health/live",
            "/metrics",
            "/shm",
            "/v2/health/ready",
            "/v2/health/live",
            "/ping",
            "/version",
            "/load",
        ),
        *page,
    }


def test_the_documented_finish_reasons_are_those_of_the_metric(http: Any) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `request_success_total`")]
    reasons = set(re.findall(r"`(\w+)`", row)) - {"request_success_total", "finished_reason"}
    assert reasons == set(re.findall(r'request_success_total\{finished_reason="(\w+)"', http.get("/metrics").text))


def test_the_metric_names_of_vllm_exist(http: Any) -> None:
    assert VLLM - metric_names(http) == set()


def test_the_example_log_line_has_the_keys_of_a_record(service: RunningService) -> None:
    (text,) = [one for one in fenced("json") if "duration_s" in one]
    assert json.loads(text).keys() >= {"time", "level", "logger", "process", "pid", "message", "request_id"}
    method, route, status = re.search(r"(\S+) (\S+) (\d+) [\d.]+ s", json.loads(text)["message"]).groups()  # type: ignore[union-attr]
    example = json.loads(text)
    assert (method, route, int(status)) == (example["method"], example["route"], example["status"])
