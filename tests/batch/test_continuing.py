"""Tests for calls that continue a run.

A call must have the same rows, settings and versions as the run. The paths of the files may differ.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mindie_mm.batch import Dataset
from mindie_mm.batch import settings as settings_module
from mindie_mm.batch.input.gather import input_named
from mindie_mm.batch.output.manifest import Manifest
from mindie_mm.batch.same_run import versions
from mindie_mm.batch.settings import Run, Settings
from mindie_mm.cli import main
from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from tests.batch.conftest import CLI, content, run, run_in_process, settings, written
from tests.namespaces import UNSHARE, require


@pytest.fixture
def place(media: Path, tmp_path: Path) -> Path:
    """Return a folder that contains a file of rows and a folder with the images of these rows."""
    folder = tmp_path / "place"
    (folder / "images").mkdir(parents=True)
    for index in range(3):
        shutil.copy(media / f"{index}.jpg", folder / "images" / f"{index}.jpg")
    written(folder / "rows.jsonl", [{"image": f"images/{index}.jpg", "text": "What?"} for index in range(3)])
    return folder


def make_unfinished_run(given: Settings, folder: Path) -> None:
    """Complete a run, and then remove its last shard and its manifest."""
    run_in_process(given, folder)
    (folder / "manifest.json").unlink()
    max(folder.glob("shard-*.parquet")).unlink()


@pytest.mark.parametrize("name", ["rows.jsonl", pytest.param("images", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["relative", "./", "..", "slash", "link", "linked folder", "moved"])
def test_an_input_under_another_path_continues_the_run(
    how: str, name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, folder = settings(place / name, shard_rows=2), tmp_path / "run"
    make_unfinished_run(given, folder)
    monkeypatch.chdir(place)
    spelled = {"relative": name, "./": f"./{name}", "..": f"../place/{name}", "slash": f"{place}//{name}"}.get(how, "")
    if how == "slash" and name == "images":
        spelled += "/"
    if how == "link":
        (tmp_path / "place" / f"link-{name}").symlink_to(place / name)
        spelled = f"link-{name}"
    elif how == "linked folder":
        (tmp_path / "linked").symlink_to(place)
        spelled = str(tmp_path / "linked" / name)
    elif how == "moved":
        place.rename(tmp_path / "elsewhere")
        spelled = str(tmp_path / "elsewhere" / name)
    again = msgspec.structs.replace(given, inputs=(input_named(spelled),))
    manifest = run_in_process(again, folder)
    assert (manifest.num_rows, manifest.num_errors) == (3, 0)
    assert manifest.run.settings.inputs == again.inputs
    run_in_process(again, tmp_path / "whole")
    assert content(folder) == content(tmp_path / "whole")


@pytest.mark.parametrize("name", ["rows.jsonl", "images"])
def test_a_copied_input_in_another_folder_is_another_input(name: str, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "other")
    run_in_process(settings(place / name), tmp_path / "run")
    with pytest.raises(
        InputError, match=rf"the input was {place / name} and is now {tmp_path / 'other' / name}\. Relative paths"
    ):
        run(settings(tmp_path / "other" / name), tmp_path / "run")


@pytest.mark.parametrize("how", ["symlink", "hard link", "moved alone"])
def test_a_linked_or_moved_file_without_its_images_is_another_input(how: str, place: Path, tmp_path: Path) -> None:
    """Relative paths of media start from the folder of the given path, so they would refer to other files."""
    given, folder, other = settings(place / "rows.jsonl", shard_rows=2), tmp_path / "run", tmp_path / "other"
    make_unfinished_run(given, folder)
    other.mkdir()
    if how == "symlink":
        (other / "rows.jsonl").symlink_to(place / "rows.jsonl")
    elif how == "hard link":
        (other / "rows.jsonl").hardlink_to(place / "rows.jsonl")
    else:
        (place / "rows.jsonl").rename(other / "rows.jsonl")
    with pytest.raises(
        InputError, match=rf"the input was {place}/rows.jsonl and is now {other}/rows.jsonl\. Relative paths"
    ):
        run(settings(other / "rows.jsonl", shard_rows=2), folder)


def test_answers_continue_after_the_input_has_moved(place: Path, tmp_path: Path) -> None:
    before = run_in_process(settings(place / "rows.jsonl"), tmp_path / "run")
    place.rename(tmp_path / "elsewhere")
    after = run(settings(tmp_path / "elsewhere/rows.jsonl"), tmp_path / "run")
    assert after != before
    assert after.digest == before.digest


def test_a_checkpoint_is_identified_by_its_files(place: Path, tmp_path: Path) -> None:
    given = settings(place / "rows.jsonl", shard_rows=2)
    make_unfinished_run(given, tmp_path / "run")
    shutil.copytree(EMBEDDED, tmp_path / "checkpoint")
    copied = msgspec.structs.replace(given, model=str(tmp_path / "checkpoint"))
    assert run_in_process(copied, tmp_path / "run").num_rows == 3
    config = tmp_path / "checkpoint/config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(InputError, match="contains another run: model_digest was "):
        run(copied, tmp_path / "run")


def test_other_versions_do_not_continue_a_run(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(place / "rows.jsonl", shard_rows=2)
    make_unfinished_run(given, tmp_path / "run")
    before = content(tmp_path / "run")
    assert {
        "mindie_mm",
        "transformers",
        "tokenizers",
        "torch",
        "numpy",
        "pillow",
        "av",
        "libavcodec",
    } <= versions().keys()
    other = {**versions(), "transformers": "4.0.0", "more": "1"}
    monkeypatch.setattr(settings_module, "versions", lambda: other)
    own = versions()["transformers"]
    message = (
        rf"versions was transformers {own}, more \(none\) and is now transformers 4\.0\.0, more 1\. Choose another "
        "folder for"
    )
    with pytest.raises(InputError, match=message):
        run(given, tmp_path / "run")
    assert content(tmp_path / "run") == before


def test_a_run_without_versions_is_read_but_not_continued(place: Path, tmp_path: Path) -> None:
    """Earlier releases did not record versions in a run."""
    given, folder = settings(place / "rows.jsonl"), tmp_path / "run"
    run_in_process(given, folder)
    for name in ("run.json", "manifest.json"):
        values: dict[str, Any] = json.loads((folder / name).read_text())
        del values.get("run", values)["versions"]
        values.pop("num_repeated_ids", None)
        (folder / name).write_text(json.dumps(values))
    assert [sample.error for sample in Dataset(folder)] == [None] * 3
    with pytest.raises(InputError, match=r"versions was mindie_mm \(none\), .*now mindie_mm "):
        run(given, folder)


def test_the_identity_of_a_run_contains_no_paths(place: Path, tmp_path: Path) -> None:
    parts = Run.of(settings(place / "rows.jsonl"), tmp_path).parts()
    assert {"model_digest", "input_digests", "versions", "chat", "media", "family"} <= parts.keys()
    assert str(tmp_path) not in json.dumps(parts)


def tokenize(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["tokenize", *map(str, arguments)])
    return done.exit_code, done.stderr


def test_an_output_that_is_a_file_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    status, message = tokenize(place / "rows.jsonl", "--output", tmp_path / "file")
    assert status == 2
    assert message == (
        f"Error: {tmp_path / 'file'} cannot be written: {tmp_path / 'file'} is not a folder. Choose a folder that "
        "you may write to, or one that does not exist yet\n"
    )
    assert (tmp_path / "file").read_text() == "mine"


def test_an_input_in_the_output_folder_is_refused(place: Path, tmp_path: Path) -> None:
    """A file that the run writes may have the same name as the input."""
    (tmp_path / "link").symlink_to(place)
    rows = place / "rows.jsonl"
    rows.rename(place / "input-000.jsonl")
    for output in (place, tmp_path / "link", place / "images/.."):
        status, message = tokenize(place / "input-000.jsonl", "--output", output)
        assert status == 2
        assert f"the input {place / 'input-000.jsonl'} is inside the output folder" in message
    status, message = tokenize(place / "images", "--output", place / "images")
    assert (status, "is inside the output folder" in message) == (2, True)
    assert sorted(path.name for path in place.iterdir()) == ["images", "input-000.jsonl"]


def test_an_output_may_be_a_link_to_a_folder(place: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run_in_process(settings(place / "rows.jsonl"), tmp_path / "link")
    assert (tmp_path / "real/manifest.json").exists()


def test_an_output_on_a_read_only_file_system_is_refused(place: Path, tmp_path: Path) -> None:
    own_mounts = (*UNSHARE, "--mount")
    require(own_mounts)
    (tmp_path / "disk").mkdir()
    steps = 'mount -t tmpfs -o ro tmpfs "$1" || exit 99; exec "$2" tokenize "$3" --output "$1/run"'
    script = ("sh", "-c", steps, "sh", str(tmp_path / "disk"), CLI, str(place / "rows.jsonl"))
    done = subprocess.run([*own_mounts, *script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "disk/run cannot be written: Read-only file system. Choose a folder" in done.stderr


def test_an_output_without_write_permission_is_refused(place: Path, tmp_path: Path) -> None:
    """The test drops root's permissions, because root may write to any folder."""
    (tmp_path / "closed").mkdir(mode=0o500)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        with pytest.raises(InputError, match=r"closed(/run)? cannot be written: Permission denied\. Choose a folder"):
            run(settings(place / "rows.jsonl"), tmp_path / "closed/run")
    finally:
        os.seteuid(user)


def test_repeated_ids_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last row has no id, so its row number 7 becomes its id. The row before has the id "7", too."""
    ids = ["a", "b", "a", "c", "b", "a", "7", None]
    rows = [{"id": name, "text": "Hello!"} for name in ids]
    run_in_process(settings(written(tmp_path / "rows.jsonl", rows), shard_rows=3), tmp_path / "run")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == (
        "4 rows have the same id as an earlier row, for example rows 0 and 2, 1 and 4, 0 and 5. "
        "Join results to the input by `row`, which is unique"
    )
    assert Manifest.read(tmp_path / "run").num_repeated_ids == 4
    caplog.clear()
    run_in_process(settings(written(tmp_path / "other.jsonl", rows[:2]), shard_rows=3), tmp_path / "other")
    assert not caplog.records
    assert Manifest.read(tmp_path / "other").num_repeated_ids == 0


def test_a_row_with_invalid_json_keeps_its_id(tmp_path: Path) -> None:
    """Half of a surrogate pair is escaped. JSON can contain such a half, but UTF-8 and tables cannot."""
    lines = [
        rb'{"id": "\ud800 a", "text": "Hello!"}',
        rb'{"id": "b", "text": "cut \ud83d"}',
        rb'{"id": "c", "text": "Hello!", "score": NaN}',
        b'{"id": "caf\xe9", "text": "Hello!"}',
        rb'{"id": 7, "image": "\udc00.jpg", "text": "Hello!"}',
        b'{"id": "lost", "text": ',
        rb'{"id": "\ud83d\ude00", "text": "\ud83d\ude00"}',
    ]
    manifest = run_in_process(settings(written(tmp_path / "rows.jsonl", lines)), tmp_path / "run")
    ids = [sample.id for sample in Dataset(tmp_path / "run")]
    assert ids == ["\\ud800 a", "b", "c", "caf\\udce9", "7", "5", "\U0001f600"]
    assert manifest.num_errors == 6
    errors = [json.loads(line) for line in (tmp_path / "run/errors.jsonl").read_bytes().decode().splitlines()]
    assert [error["id"] for error in errors] == ids[:-1]
    for row, half in ((0, "ud800"), (1, "ud83d"), (4, "udc00")):
        assert f"it has \\{half}, half of a surrogate pair" in errors[row]["error"]


def test_a_table_id_that_is_not_utf_8_is_escaped(tmp_path: Path) -> None:
    ids = _text(b"a\xed\xa0\x80", b"b")
    pq.write_table(pa.table({"id": ids, "text": ["Hello!", "Hello!"]}), tmp_path / "rows.parquet")
    assert run_in_process(settings(tmp_path / "rows.parquet"), tmp_path / "run").num_errors == 0
    assert [sample.id for sample in Dataset(tmp_path / "run")] == ["a\\xed\\xa0\\x80", "b"]


def _text(*values: bytes) -> pa.Array:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)
