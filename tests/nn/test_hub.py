"""Tests for names on the Hugging Face Hub in place of folders, with a local server."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from mindie_mm.errors import OperationalError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.hub import downloaded, repository_name
from tests.hub_server import COMMIT, Hub, running_hub

NAME = "owner/model"
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 800,
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"in another layout",
    "onnx/model.json": b"{}",
    "vision-lora/adapter_config.json": b"{}",
    "README.md": b"a model",
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running_hub(Hub(NAME, FILES)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def test_only_the_needed_files_are_downloaded_and_the_hub_is_not_asked_again(hub, tmp_path):
    asked = []
    folder = downloaded(NAME, None, lambda text: asked.append(text) or True)
    assert folder == tmp_path / "cache" / "models--owner--model" / "snapshots" / COMMIT
    assert {file.name for file in folder.rglob("*.*")} == {"config.json", "model.safetensors", "adapter_config.json"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert asked == [f"{NAME}: 3 files, less than 10 MB, from {hub.url} to {tmp_path}/cache"]
    hub.requests.clear()
    assert downloaded(NAME, None, None) == folder
    assert not hub.requests


def test_pickled_weights_are_downloaded_if_there_are_no_others(hub):
    hub.files = {name: FILES[name] for name in ("config.json", "pytorch_model.bin")}
    folder = downloaded(NAME, "v1", lambda _: True)
    assert {file.name for file in folder.iterdir()} == set(hub.files)
    assert downloaded(NAME, "v1", None) == folder


def test_without_weights_the_settings_suffice(hub):
    folder = downloaded(NAME, None, lambda _: True, weights=False)
    assert not list(folder.rglob("*.safetensors"))
    hub.requests.clear()
    assert downloaded(NAME, None, None, weights=False) == folder
    assert not hub.requests
    with pytest.raises(UnsupportedCheckpoint, match="set download"):  # the weights are not there
        downloaded(NAME, None, None)


def test_an_interrupted_download_continues(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**14)
    hub.breaks_at = 100_000
    folder = downloaded(NAME, None, lambda _: True)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert [request for request in hub.requests if "bytes=" in request]


def test_a_download_that_is_not_allowed_or_declined_writes_nothing(hub, tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match=f"there is no folder {NAME} here. To download {hub.url}/{NAME}"):
        downloaded(NAME, None, None)
    assert not hub.requests
    with pytest.raises(UnsupportedCheckpoint, match="was not downloaded"):
        downloaded(NAME, None, lambda _: False)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("name", "revision", "gated", "message"),
    [
        ("owner/other", None, False, "no public repository .*/owner/other. If it is private, set HF_TOKEN"),
        (NAME, "v2", False, "has no branch, tag or commit v2"),
        (NAME, None, True, "is gated: accept its licence"),
        ("owner/model..", None, False, "is not the name of a repository"),
    ],
    ids=["unknown", "revision", "gated", "invalid"],
)
def test_a_refusal_of_the_hub_says_what_to_do(hub, name, revision, gated, message):
    hub.gated = gated
    with pytest.raises(UnsupportedCheckpoint, match=message):
        downloaded(name, revision, lambda _: True)


def test_a_hub_that_cannot_be_reached_is_named(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OperationalError, match=f"{NAME} cannot be downloaded from http://127.0.0.1:9/{NAME}: "):
        downloaded(NAME, None, lambda _: True)


def test_offline_mode_is_named(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OperationalError, match=r"HF_HUB_OFFLINE is set, and .*cache has no complete copy"):
        downloaded(NAME, None, lambda _: True)


def test_an_existing_folder_is_not_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert repository_name(tmp_path / NAME) == NAME
    assert [repository_name(tmp_path / other) for other in ("model", "../x/y", "a/b/c")] == [None] * 3
    monkeypatch.chdir("/")  # as in a container
    assert repository_name(Path("/owner/model")) == NAME
    assert repository_name(tmp_path / NAME) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert repository_name(tmp_path / NAME) is None
