"""Settings with which no request could be answered: told in a line before anything is loaded."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from mindie_mm.errors import InputError
from mindie_mm.settings.config import ServiceConfig
from tests import warm


def refused(*flags: object) -> str:
    """What a service says that does not start for a setting that is to be mended."""
    command = [Path(sys.executable).with_name("mindie-mm"), "serve", "--port", 0, *flags]
    ended = warm.run(command, timeout=300, env=os.environ | {"MINDIE_MM_LOG_FORMAT": "text"})
    assert ended.returncode == 2, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "mindie_mm.settings: " not in line]
    assert len(said) == 1, "neither a trace nor a word of loading"
    return said[0]


def test_a_spool_that_cannot_be_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert re.fullmatch(r"Error: spool /proc/x cannot be created: .*", refused("--spool", "/proc/x"))
    assert re.fullmatch(rf"Error: spool {file} cannot be created: .*", refused("--spool", file))
    assert re.fullmatch(rf"Error: spool {file}/x cannot be created: .*", refused("--spool", file / "x"))
    assert file.is_file()


def test_a_spool_that_cannot_be_written() -> None:
    """Nobody makes a folder in it, whatever the modes say."""
    if os.geteuid() or not Path("/sys/kernel").is_dir():
        pytest.skip("not the owner of /sys/kernel")
    assert re.fullmatch("Error: spool /sys/kernel cannot be written: .*", refused("--spool", "/sys/kernel"))


def test_a_folder_of_media_that_is_none(tmp_path: Path) -> None:
    spool, file = tmp_path / "spool", tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "nothing", file):
        said = refused("--spool", spool, "--allowed-media-dir", folder)
        assert said == f"Error: allowed_media_dir is {folder}, which is not a folder"
    assert list(spool.iterdir()) == []


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(InputError, match=f"port is {port}; it must be an integer from 0 to 65535"):
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
def test_an_origin_that_no_browser_sends(origin: str) -> None:
    with pytest.raises(InputError, match="cors_origin is '"):
        ServiceConfig(cors_origin=("https://example.org", origin))
    ServiceConfig(
        cors_origin=("*", "http://localhost:3000", "http://[::1]:*", "chrome-extension://abc", "https://a:80")
    )


def test_a_misspelt_variable_is_in_the_log(tmp_path: Path) -> None:
    """And the start goes on: here to a mistake that ends it."""
    command = [Path(sys.executable).with_name("mindie-mm"), "serve", "--spool", tmp_path, "--allowed-media-dir", "/no"]
    ended = warm.run([*command, "--port", 0], timeout=300, env=os.environ | {"MINDIE_MM_MAX_IMAGE": "a-value"})
    assert " WARNING api[" in ended.stderr
    assert "MINDIE_MM_MAX_IMAGE is not a setting; did you mean MINDIE_MM_MAX_IMAGES?" in ended.stderr
    assert "a-value" not in ended.stderr
    assert "allowed_media_dir is /no" in ended.stderr
