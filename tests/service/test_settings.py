"""Tests that invalid settings are reported in one line before the model is loaded."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from mindie_mm.errors import InputError
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.settings.sources import CLASSES, PARTS
from service.http.access import require_key
from tests import warm
from tests.warm import running_service


def error_of_start(*flags: object) -> str:
    """Start a service with an invalid setting, and return its error, which must be a single line."""
    command = [Path(sys.executable).with_name("mindie-mm"), "serve", "--port", 0, *flags]
    ended = warm.run(command, timeout=300, env=os.environ | {"MINDIE_MM_LOG_FORMAT": "text"})
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "mindie_mm.settings: " not in line]
    assert len(lines) == 1, "neither a trace nor a word of loading"
    return lines[0]


def test_the_debug_log_names_the_source_of_each_setting(tmp_path: Path) -> None:
    command = [
        Path(sys.executable).with_name("mindie-mm"),
        "serve",
        "--port",
        0,
        "--allowed-media-dir",
        tmp_path / "no",
    ]
    variables = {"MINDIE_MM_LOG_LEVEL": "debug", "MINDIE_MM_LOG_FORMAT": "text", "MINDIE_MM_SPOOL": str(tmp_path)}
    ended = warm.run(command, timeout=300, env=os.environ | variables)
    sources = dict(re.findall(r"DEBUG .* mindie_mm\.settings: (\w+) = .* \(([^()]*)\)\n", ended.stderr))
    assert sources.keys() == {field.name for cls in CLASSES for field in dataclasses.fields(cls)} - PARTS
    assert sources["port"] == "--port"
    assert sources["log_level"] == "MINDIE_MM_LOG_LEVEL"
    assert sources["max_media_items"] == "default"


def test_a_spool_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert re.fullmatch(r"Error: spool /proc/x cannot be created: .*", error_of_start("--spool", "/proc/x"))
    assert re.fullmatch(rf"Error: spool {file} cannot be created: .*", error_of_start("--spool", file))
    assert re.fullmatch(rf"Error: spool {file}/x cannot be created: .*", error_of_start("--spool", file / "x"))
    assert file.is_file()


def test_a_spool_that_cannot_be_written_is_refused() -> None:
    """The test uses a folder in sysfs, where nobody can create folders, not even root."""
    if os.geteuid() or not Path("/sys/kernel").is_dir():
        pytest.skip("not the owner of /sys/kernel")
    assert re.fullmatch("Error: spool /sys/kernel cannot be written: .*", error_of_start("--spool", "/sys/kernel"))


def test_a_missing_media_folder_is_refused(tmp_path: Path) -> None:
    spool, file = tmp_path / "spool", tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "nothing", file):
        error = error_of_start("--spool", spool, "--allowed-media-dir", folder)
        assert error == f"Error: allowed_media_dir is {folder}, which is not a folder"
    assert list(spool.iterdir()) == []


def test_a_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for flag, noun in (("--tool-call-parser", "tool-call"), ("--reasoning-parser", "reasoning")):
        error = error_of_start("--spool", tmp_path / "spool", flag, "nothing")
        assert error.startswith(f"Error: there is no {noun} format named 'nothing'; the formats are ")


def test_a_service_that_must_not_be_open_needs_a_key_beyond_loopback(tmp_path: Path) -> None:
    beyond = ("--host", "0.0.0.0", "--spool", tmp_path)
    error = error_of_start(*beyond, "--no-allow-open")
    assert error.startswith("Error: the service would listen on 0.0.0.0 without an API key")
    assert "MINDIE_MM_ALLOW_OPEN=1" in error
    for config in (
        ServiceConfig(allow_open=False, host="0.0.0.0", api_key=("key",)),
        ServiceConfig(allow_open=False),
        ServiceConfig(host="0.0.0.0"),
    ):
        require_key(config)


def test_an_open_service_with_two_names_warns_and_starts_with_few_lines(
    settings: dict[str, object], tmp_path: Path
) -> None:
    log, names = tmp_path / "log", {"MINDIE_MM_SERVED_MODEL_NAME": "first,second"}
    given = {**settings, "host": "0.0.0.0", "spool": tmp_path / "spool", "log_level": "info"}
    with running_service(given, log, environment=names) as service:
        port = urlsplit(service.url).port
        ready = rf"mindie_mm serves first at http://0\.0\.0\.0:{port} on \S+ in \w+, with \d+\.\d GiB free\n"
        assert re.fullmatch(ready, service.announcement)
        assert [one["id"] for one in service.get("/v1/models")["data"]] == ["first", "second"]
        body = {"model": "second", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
        answer = httpx2.post(f"{service.url}/v1/chat/completions", json=body, timeout=300)
        assert (answer.status_code, answer.json()["model"]) == (200, "first")
    # On a busy machine, the service says every 10 s that it still loads.
    begun = log.read_text().partition(" service.access: ")[0].splitlines()[:-1]
    lines = [line for line in begun if "loading the model for" not in line]
    assert len(lines) < 8, lines
    assert len([line for line in lines if "WARNING" in line and "THIS SERVICE IS OPEN" in line]) == 1
    (shown,) = [line for line in lines if "mindie_mm.settings: " in line]
    assert 'host = "0.0.0.0" (--host)' in shown
    assert "(default)" not in shown


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_outside_its_range_is_refused(port: int) -> None:
    with pytest.raises(InputError, match=f"port={port} must be an integer from 0 to 65535"):
        ServiceConfig(port=port)
    assert ServiceConfig(port=65535).port == 65535


@pytest.mark.parametrize(
    "origin",
    [
        *("example.org", "https://example.org/", "https://example.org/page", "https://Example.org", "", "https://"),
        *("https://*.example.org", "http://localhost:30*", "http://*", "http://*:*", "https://b\xfccher.example"),
        *("http://localhost:80", "https://example.org:443", "http://localhost:", "http://localhost:123456", "null"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(InputError, match="cors_origin='"):
        ServiceConfig(cors_origin=("https://example.org", origin))
    ServiceConfig(
        cors_origin=("*", "http://localhost:3000", "http://[::1]:*", "chrome-extension://abc", "https://a:80")
    )


def test_a_misspelled_variable_is_logged_without_its_value(tmp_path: Path) -> None:
    """The service continues after the warning. The test gives a second, invalid setting to end the start."""
    command = [Path(sys.executable).with_name("mindie-mm"), "serve", "--spool", tmp_path, "--allowed-media-dir", "/no"]
    ended = warm.run([*command, "--port", 0], timeout=300, env=os.environ | {"MINDIE_MM_MAX_MEDIA_ITEM": "a-value"})
    assert " WARNING api[" in ended.stderr
    assert "MINDIE_MM_MAX_MEDIA_ITEM is not a setting; did you mean MINDIE_MM_MAX_MEDIA_ITEMS?" in ended.stderr
    assert "a-value" not in ended.stderr
    assert "allowed_media_dir is /no" in ended.stderr
