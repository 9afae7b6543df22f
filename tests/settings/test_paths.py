"""Tests for relative paths. They are resolved when a setting or an argument is given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindie_mm import Dataset, Tokenizer, WorkerConfig
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import EMBEDDED, Checkpoint
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.settings.environment import keep_python_path
from mindie_mm.settings.paths import absolute
from mindie_mm.settings.sources import configuration
from mindie_mm.shm import release, request_directory
from tests.media_samples import encoded, photograph


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory. It contains a checkpoint and an image."""
    (tmp_path / "tiny").symlink_to(EMBEDDED)
    (tmp_path / "a.jpg").write_bytes(encoded(photograph("chelsea.png", (60, 48))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def removed(tmp_path, monkeypatch):
    """Change to a new working directory, and remove it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()


def test_settings_of_every_source_have_absolute_paths(folder, monkeypatch):
    monkeypatch.setenv("MINDIE_MM_SPOOL", "spool")
    (folder / "settings.toml").write_text('allowed_media_dir = "media"\n')
    found = configuration({"model": Path("tiny")}, Path("settings.toml"))
    assert (found.worker.model, found.service.spool) == (folder / "tiny", folder / "spool")
    assert found.service.allowed_media_dir == folder / "media"
    assert (WorkerConfig(model="tiny").model, WorkerConfig().model) == (folder / "tiny", None)
    assert ServiceConfig(spool=Path("/spool/../other")).spool == Path("/spool/../other"), "links count"


def test_a_relative_path_stays_valid_after_a_change_of_directory(folder, monkeypatch):
    checkpoint = Checkpoint.open("tiny")
    with request_directory(Path("spool")) as request, Tokenizer.from_pretrained("tiny") as tokenizer:
        monkeypatch.chdir("/")
        assert checkpoint.json("tokenizer.json")
        assert len(tokenizer.tokenize([{"image": str(folder / "a.jpg")}], request.path_file)) > 4
    assert not request.path.exists()


def test_a_path_file_may_be_relative(folder, monkeypatch):
    with Tokenizer.from_pretrained("tiny") as tokenizer:
        tokenizer.tokenize([{"image": "a.jpg"}], "path.txt")
        monkeypatch.chdir("/")
        assert release(folder / "path.txt") == 1


def test_a_name_of_the_hub_is_recognized(folder):
    with pytest.raises(
        UnsupportedCheckpoint, match="If Qwen/Qwen2-VL is a repository on the Hugging Face Hub, download it"
    ):
        Checkpoint.open(WorkerConfig(model=Path("Qwen/Qwen2-VL")).model)
    with pytest.raises(
        UnsupportedCheckpoint, match=f"^{folder}/tin is not a checkpoint directory: it has no config.json$"
    ):
        Checkpoint.open("tin")


@pytest.mark.parametrize(
    "take",
    [
        absolute,
        Checkpoint.open,
        Tokenizer.from_pretrained,
        Dataset,
        lambda path: WorkerConfig(model=Path(path)),
        lambda path: configuration({"spool": Path(path)}),
        lambda path: request_directory(Path(path)).__enter__(),
    ],
)
@pytest.mark.usefixtures("removed")
def test_a_relative_path_in_a_removed_directory_is_refused(take):
    with pytest.raises(InputError, match="tiny is a relative path, but the working directory was removed"):
        take("tiny")


@pytest.mark.usefixtures("removed")
def test_absolute_paths_work_in_a_removed_directory():
    with Tokenizer.from_pretrained(EMBEDDED) as tokenizer:
        assert len(tokenizer.tokenize([{"text": "a"}])) == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [("plugins:/a:.", "{0}/plugins:/a:{0}"), ("/a:/b/../c", "/a:/b/../c"), ("", ""), ("/a:", "/a:{0}")],
)
def test_child_processes_import_from_the_same_folders(folder, monkeypatch, given, kept):
    """Entries of sys.path become absolute, as with Python's module `site`.

    An empty entry means the working directory.
    """
    monkeypatch.setenv("PYTHONPATH", given)
    keep_python_path()
    assert os.environ["PYTHONPATH"] == kept.format(folder)
    script = "import sys; print(sys.path)"
    monkeypatch.setenv("PYTHONPATH", given)
    (before, after) = (
        subprocess.run([sys.executable, "-P", "-c", script], env=env, capture_output=True, check=True).stdout
        for env in (os.environ | {"PYTHONPATH": given}, os.environ | {"PYTHONPATH": kept.format(folder)})
    )
    assert before == after
