"""Tests that a run that is killed at any step and then resumed writes the same bytes as an undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mindie_mm.batch.output.shard import table_path
from mindie_mm.batch.settings import require_run
from mindie_mm.errors import InputError
from mindie_mm.processes import faults
from tests.batch.conftest import content, run, run_in_process, settings, written

POINTS = (
    "written run.json",
    "row 0",
    "row 5",
    "finished shard-000000000.safetensors",
    "written shard-000000000.parquet",
    "named shard-000000000.parquet",
    "row 7",
    "named shard-000000007.parquet",
    "written errors.jsonl",
    "written manifest.json",
    "named manifest.json",
)


@pytest.fixture(scope="module")
def few(media: Path) -> Path:
    """Return a file of eight rows, which is processed in two chunks. One row is invalid."""
    rows = [{"inputs": [{"image": f"{i}.jpg"}, {"text": "What?"}]} for i in range(7)]
    return written(media / "few.jsonl", [*rows[:3], {"text": 5}, *rows[4:], {"text": "the last"}])


@pytest.fixture(scope="module")
def whole(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_in_process(settings(few), folder)
    return folder


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_any_point_resumes_to_the_same_bytes(
    point: str, few: Path, whole: Path, tmp_path: Path
) -> None:
    trigger = tmp_path / f"batch.{point}"
    trigger.touch()
    killed = os.fork()
    if not killed:
        try:
            faults.arm("batch", tmp_path)
            run_in_process(settings(few), tmp_path / "run")
        finally:
            os._exit(1)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    assert not trigger.exists()
    assert run_in_process(settings(few), tmp_path / "run").num_rows == 8
    assert content(tmp_path / "run") == content(whole)


def test_a_shard_of_another_run_is_not_reused(few: Path, whole: Path, tmp_path: Path) -> None:
    run_in_process(settings(few, chat=False), tmp_path / "run")
    assert content(tmp_path / "run") != content(whole)
    (tmp_path / "run/run.json").unlink()
    (tmp_path / "run/manifest.json").unlink()
    (tmp_path / "run/errors.jsonl").unlink()
    run_in_process(settings(few), tmp_path / "run")
    assert content(tmp_path / "run") == content(whole)


def test_files_left_by_killed_actors_are_removed_at_the_end(few: Path, whole: Path, tmp_path: Path) -> None:
    """Such files are accepted when a run begins, because they may be copied from another node with its shards."""
    (tmp_path / "run").mkdir()
    for name in ("at-3.json", "input-000.jsonl.0123abcd.partial"):
        (tmp_path / "run" / name).write_text("{}")
    require_run(tmp_path / "run")
    run_in_process(settings(few), tmp_path / "run")
    assert content(tmp_path / "run") == content(whole)


def test_a_folder_with_other_files_is_refused_and_unchanged(few: Path, tmp_path: Path) -> None:
    (tmp_path / "errors.jsonl").write_text("mine")
    with pytest.raises(
        InputError,
        match=r"does not contain a run, but has other files, such as errors\.jsonl\. Choose a folder that is empty",
    ):
        run(settings(few), tmp_path)
    assert (tmp_path / "errors.jsonl").read_text() == "mine"


def test_an_output_that_is_no_folder_is_refused_with_its_path(few: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for name, why in (
        ("file", "file is not a folder"),
        ("file/below/it", "file is not a folder"),
        ("link", "link is a broken symbolic link"),
        ("round", "round is a broken symbolic link"),
        ("x" * 300, "File name too long"),
    ):
        with pytest.raises(InputError, match=rf"cannot be written: .*{why}\. Choose a folder that you may write to"):
            run(settings(few), tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "round"]


def test_a_change_in_the_middle_of_the_input_is_detected(tmp_path: Path) -> None:
    rows = [{"text": f"word {i} " + "x" * 90_000} for i in range(9)]
    path = written(tmp_path / "rows.jsonl", rows)
    run_in_process(settings(path, max_tokens=1), tmp_path / "run")
    path.write_bytes(path.read_bytes().replace(b"word 4", b"word 5"))
    with pytest.raises(InputError, match=r"contains another run: input_digests\[0\] was"):
        run(settings(path, max_tokens=1), tmp_path / "run")


def test_an_input_without_rows_gives_an_empty_run(tmp_path: Path) -> None:
    manifest = run(settings(written(tmp_path / "none.jsonl", [])), tmp_path / "run")
    assert (manifest.num_rows, manifest.shards) == (0, [])
    assert (tmp_path / "run/errors.jsonl").read_bytes() == b""


def test_a_table_without_its_arrays_is_rebuilt(few: Path, whole: Path, tmp_path: Path) -> None:
    run_in_process(settings(few), tmp_path / "run")
    table_path(tmp_path / "run", 0).with_suffix(".safetensors").unlink()
    run_in_process(settings(few), tmp_path / "run")
    assert content(tmp_path / "run") == content(whole)


def test_a_damaged_table_is_rebuilt(few: Path, whole: Path, tmp_path: Path) -> None:
    run_in_process(settings(few), tmp_path / "run")
    (tmp_path / "run/manifest.json").unlink()
    table = table_path(tmp_path / "run", 0)
    table.write_bytes(table.read_bytes()[:-9])
    run_in_process(settings(few), tmp_path / "run")
    assert content(tmp_path / "run") == content(whole)
