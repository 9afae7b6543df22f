"""Tests for commands with the name of a repository on the Hugging Face Hub in place of a folder."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindie_mm.cli import render, serve
from mindie_mm.cli.hub import with_model_id
from mindie_mm.cli.settings import configured
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from tests.cli.shell import BIN, TIMEOUT_S, run
from tests.hub_server import Hub, running_hub

NAME = "owner/shapes"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(Hub(NAME, {file.name: file.read_bytes() for file in EMBEDDED.iterdir()})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        yield hub


def test_the_model_id_is_the_model_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    for command in (render.command, serve.command):
        for argument in ("./ckpt/", NAME):
            path = command.make_context("", [argument]).params["path"]
            assert with_model_id(configured(path, {}), path).service.model_id == argument
    monkeypatch.setenv("MINDIE_MM_MODEL", NAME)
    assert with_model_id(configured(None, {}), None).service.model_id == NAME


@pytest.mark.slow
def test_a_name_is_judged_then_downloaded_then_used_without_the_hub(hub: Hub) -> None:
    judged = run("doctor", NAME)
    download = f"to download them: mindie-mm serve {NAME} --download"
    assert f"qwen2_5_omni, served; these files are missing: model.safetensors\t{download}\n" in judged
    assert "ok\tmachine\tnot checked, because" in judged
    assert "ok\tweights\t0.0 GiB in the files; the device " in judged
    assert not [request for request in hub.requests if request.startswith("GET") and "safetensors" in request]
    hub.requests.clear()
    refused = run("ask", "--model", NAME, "Hello!", status=2)
    assert re.search(rf"there is no folder {NAME} here. To download .*/{NAME}, set download: add --download", refused)
    assert not hub.requests
    assert run("ask", "--model", NAME, "--download", "Hello!", "--max-tokens", "2")
    assert "model.safetensors" not in run("doctor", NAME, HF_HUB_OFFLINE="1")


def test_a_terminal_is_asked_before_a_download(hub: Hub) -> None:
    primary, secondary = pty.openpty()
    command = [BIN, "ask", "--model", NAME, "Hello!"]
    with subprocess.Popen(command, stdin=secondary, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as asked:
        os.close(secondary)
        os.write(primary, b"n\n")
        _, errors = asked.communicate(timeout=TIMEOUT_S)
    os.close(primary)
    assert re.search(rf"Download {NAME}: 9 files, less than 10 MB, from {hub.url} to \S+\? \[y/N\]", errors)
    assert errors.endswith(f"Error: {NAME} was not downloaded\n")
