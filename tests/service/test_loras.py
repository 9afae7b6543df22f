"""Tests for LoRA adapters in the service: model names, and loading while requests run."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from mindie_mm.models import load_model
from tests.lora_samples import linear_names, write_adapter
from tests.warm import running_service
from tests.watching import metric
from tools.serving import RunningService

KEY = "the-operators-key"
ADMIN = {"Authorization": f"Bearer {KEY}"}
ENGINE = "mindie_mm.engine.process.engine_process"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with four adapters of the embedded checkpoint: a, b, c, and large, whose rank is too high."""
    path = tmp_path_factory.mktemp("loras")
    plain = load_model(None, "cpu", "float32", prepares=False).module
    names = [name for name in linear_names(plain) if "language_model" in name]
    for seed, name in enumerate("abc"):
        write_adapter(path / name, plain, names, seed=seed)
    write_adapter(path / "large", plain, names, rank=9)
    return path


@pytest.fixture(scope="module")
def running(folder: Path, settings: dict[str, object]) -> Iterator[RunningService]:
    own = {"lora": f"first={folder / 'a'}", "lora_dir": folder, "admin_key": KEY, "max_lora_rank": 8}
    given = settings | own | {"spool": folder / "spool", "served_model_name": "base"}
    with running_service(given, folder / "log") as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def http(running: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=running.url, timeout=300) as client:
        yield client


def asked(http: httpx2.Client, model: str, **changes: Any) -> str:
    body = {"model": model, "prompt": "What is in the image?", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body | changes)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


def load(http: httpx2.Client, headers: dict[str, str] = ADMIN, **body: Any) -> httpx2.Response:
    return http.post("/v1/load_lora_adapter", json=body, headers=headers)


def unload(http: httpx2.Client, name: str) -> httpx2.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def test_an_adapter_is_listed_with_its_parent_and_selected_by_its_name(http: Any, folder: Path) -> None:
    base, first = http.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("base", None)
    assert (first["id"], first["parent"], first["root"]) == ("first", "base", str(folder / "a"))
    assert http.get("/v1/models/first").json() == first
    assert asked(http, "first") != asked(http, "base")
    chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "first", "max_tokens": 4}
    assert http.post("/v1/chat/completions", json=chat).json()["model"] == "first"
    response = http.post("/v1/responses", json={"input": "Hi", "model": "first", "max_output_tokens": 16}).json()
    assert response["model"] == "first"
    refused = http.post("/v1/completions", json={"model": "second", "prompt": "Hi"})
    assert refused.status_code == 404
    assert "serves 'base' or 'first'" in refused.json()["error"]["message"]


def test_adapters_are_counted(http: Any, running: RunningService) -> None:
    labels = {"lora_name": "first"}
    before = metric(running, "lora_generation_tokens_total", **labels)
    asked(http, "first")
    assert metric(running, "lora_generation_tokens_total", **labels) == before + 8
    assert metric(running, "lora_request_success_total", **labels) >= 1
    assert metric(running, "lora_prompt_tokens_total", **labels) >= 1


def test_answers_state_their_adapter_and_its_metrics_end_when_it_is_unloaded(http: Any) -> None:
    def fingerprint(model: str) -> str:
        body = {"model": model, "prompt": "Hi", "max_tokens": 1}
        return str(http.post("/v1/completions", json=body).json()["system_fingerprint"])

    found = [fingerprint("base"), fingerprint("first")]
    for path in ("b", "c"):
        assert load(http, lora_name="second", lora_path=path, load_inplace=True).status_code == 200
        found.append(fingerprint("second"))
    assert len({*found}) == 4
    assert 'lora_name="second"' in http.get("/metrics").text
    assert unload(http, "second").status_code == 200
    assert 'lora_name="second"' not in http.get("/metrics").text
    assert 'lora_name="first"' in http.get("/metrics").text


def test_adapters_are_loaded_and_unloaded_while_requests_run(http: Any, folder: Path, running: RunningService) -> None:
    first, base = asked(http, "first"), asked(http, "base")
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(asked, http, name) for name in ("first", "base") * 4]
        for _ in range(3):
            loaded = load(http, lora_name="second", lora_path="b")
            assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
            second = asked(http, "second")
            gone = unload(http, "second")
            assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
        assert [one.result() for one in others] == [first, base] * 4
    assert second not in (first, base)
    assert load(http, lora_name="second", lora_path=str(folder / "b")).status_code == 200
    (engine,) = [one for one in psutil.Process(running.process.pid).children() if ENGINE in one.cmdline()]
    os.kill(engine.pid, signal.SIGKILL)
    assert [asked(http, name) for name in ("second", "first", "base")] == [second, first, base]
    assert load(http, lora_name="second", lora_path="c").status_code == 400
    assert load(http, lora_name="second", lora_path="c", load_inplace=True).status_code == 200
    assert asked(http, "second") not in (first, base, second)
    assert unload(http, "second").status_code == 200
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["base", "first"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": "b"}, 400, "lora_name"),
        ({"lora_name": 5, "lora_path": "b"}, 400, "lora_name"),
        ({"lora_name": " x", "lora_path": "b"}, 400, "no space at its ends"),
        ({"lora_name": "x" * 257, "lora_path": "b"}, 400, "lora_name"),
        ({"lora_name": "x", "lora_path": ""}, 400, "lora_path"),
        ({"lora_name": "base", "lora_path": "b"}, 400, "a name of the served model"),
        ({"lora_name": "first", "lora_path": "b"}, 400, "The lora adapter 'first' has already been loaded"),
        ({"lora_name": "x", "lora_path": "nowhere"}, 404, "No adapter found"),
        ({"lora_name": "x", "lora_path": "../"}, 400, "not below the folder of --lora-dir"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "not below the folder of --lora-dir"),
        ({"lora_name": "x", "lora_path": "a/../../"}, 400, "not below the folder of --lora-dir"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "not below the folder of --lora-dir"),
        ({"lora_name": "x", "lora_path": "linked"}, 400, "or has files that are not"),
        ({"lora_name": "x", "lora_path": "b\0"}, 400, "is no path"),
        ({"lora_name": "x", "lora_path": "b" * 400}, 400, "is no path: File name too long"),
        ({"lora_name": "x", "lora_path": "loop"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "pipe"}, 400, "has no adapter_config.json"),
        ({"lora_name": "x", "lora_path": "."}, 400, "has no adapter_config.json"),
        ({"lora_name": "x", "lora_path": "large"}, 400, "has rank 9; the limit is 8"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_nothing_is_half_loaded(
    body: dict[str, Any], status: int, message: str, http: Any, folder: Path, tmp_path: Path
) -> None:
    for name, target in (("link", tmp_path), ("loop", folder / "loop")):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    for name in ("linked", "pipe"):
        shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(folder / "b", folder / "linked")
    shutil.move(folder / "linked" / "adapter_model.safetensors", tmp_path / "weights")
    (folder / "linked" / "adapter_model.safetensors").symlink_to(tmp_path / "weights")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "adapter_config.json")
    refused = load(http, **body)
    assert refused.status_code == status, refused.text
    assert message in refused.json()["error"]["message"]
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["base", "first"]


def test_only_the_operator_loads_adapters(http: Any, service: Any) -> None:
    body = {"lora_name": "x", "lora_path": "b"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert http.post(path, json=body).status_code == 401
        assert http.post(path, json=body, headers={"Authorization": "Bearer no"}).status_code == 401
        off = httpx2.post(f"{service.url}{path}", json=body)
        assert off.status_code == 404
        assert "start it with --lora-dir FOLDER" in off.json()["error"]["message"]
    assert unload(http, "x").status_code == 404
