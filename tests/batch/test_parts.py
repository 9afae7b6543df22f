"""Tests for runs that are processed again or in parts: --retry-errors, --part and merge."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mindie_mm.batch import Dataset
from mindie_mm.batch.output.manifest import Manifest, drop_failed
from mindie_mm.batch.output.run_folder import RunFolder
from mindie_mm.cli import main
from mindie_mm.errors import InputError
from tests.batch.conftest import content, run_in_process, settings, tokenize, write_shards, written

ROWS: list[dict[str, Any]] = [{"text": f"row {row}"} for row in range(23)]
SHARD_ROWS = ("--shard-rows", 7)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture
def rows(tmp_path: Path, media: Path) -> Path:
    (tmp_path / "0.jpg").write_bytes((media / "0.jpg").read_bytes())
    failing = {"image": "late.jpg", "text": "What?"}
    return written(tmp_path / "rows.jsonl", [*ROWS[:9], {"image": "0.jpg", "text": "What?"}, failing, *ROWS[9:]])


def in_parts(rows: Path, folder: Path, count: int, **others: Any) -> list[Path]:
    """Write a run in parts with the command, and return the folders of the parts."""
    folders = []
    for number in range(1, count + 1):
        folders.append(folder / f"part {number}")
        write_shards(settings(rows, **others), folders[-1], f"{number}/{count}")
        done = invoke("tokenize", rows, "--output", folders[-1], *SHARD_ROWS, "--part", f"{number}/{count}")
        assert done.exit_code in (0, 1), done.output
    return folders


@pytest.mark.parametrize("count", [1, 3, 5])
def test_merged_parts_are_the_bytes_of_one_run(count: int, rows: Path, tmp_path: Path) -> None:
    """With five parts, a part has no rows, because the input has four chunks."""
    parts = in_parts(rows, tmp_path, count)
    assert sum(Manifest.read(part).num_rows for part in parts) == 25
    done = invoke("merge", *reversed(parts), "--output", tmp_path / "merged")
    assert (done.exit_code, done.stdout.split(" tokens")[0][:18]) == (1, "25 rows, 1 failed,"), done.output
    run_in_process(settings(rows), tmp_path / "whole")
    assert content(tmp_path / "merged") == content(tmp_path / "whole")
    assert invoke("merge", *parts, "--output", tmp_path / "merged").exit_code == 1, "a merge may be repeated"
    assert content(tmp_path / "merged") == content(tmp_path / "whole")


def test_parts_written_under_other_paths_are_merged_with_a_message(rows: Path, tmp_path: Path) -> None:
    first, second = in_parts(rows, tmp_path, 2)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("rows.jsonl", "0.jpg"):
        shutil.copy(tmp_path / name, moved / name)
    _, second = in_parts(moved / "rows.jsonl", moved, 2)
    done = invoke("merge", first, second, "--output", tmp_path / "merged")
    assert done.stdout.startswith(f"run.json and manifest.json have the paths of {first}: inputs[0] was {rows}")
    assert [sample.row for sample in Dataset(tmp_path / "merged")] == [*range(25)]


def test_what_is_not_all_parts_of_one_run_is_not_merged(rows: Path, tmp_path: Path) -> None:
    first, second = in_parts(rows, tmp_path, 2)
    (tmp_path / "other").mkdir()
    _, other = in_parts(rows, tmp_path / "other", 2)
    run_in_process(settings(rows, limit=1), tmp_path / "whole")
    run_file = other / "manifest.json"
    run_file.write_text(run_file.read_text().replace('"shard_rows": 7', '"shard_rows": 8'))
    for parts, why in (
        ([first], "the folders have the parts 1/2; give each of the parts 1/N to N/N once"),
        ([first, first, second], "the folders have the parts 1/2, 1/2, 2/2; give each"),
        ([first, tmp_path / "whole"], "whole is not a part of a run: it was written without --part"),
        ([first, other], "are parts of different runs: shard_rows was 7 and is now 8"),
    ):
        refused = invoke("merge", *parts, "--output", tmp_path / "merged")
        assert (refused.exit_code, why in refused.stderr) == (2, True), refused.output
    with pytest.raises(InputError, match=r"has part 1/2 of a run\. Combine the parts with `mindie-mm merge`"):
        Dataset(first)
    refused = invoke("tokenize", rows, "--output", first, *SHARD_ROWS)
    assert "contains another run: part was 1/2 and is now all rows" in refused.stderr
    table = next(second.glob("*.parquet"))
    table.write_bytes(table.read_bytes() + b"x")
    damaged = invoke("merge", first, second, "--output", tmp_path / "damaged")
    assert (damaged.exit_code, "is not the file that the run wrote" in damaged.stderr) == (3, True)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_part_that_does_not_exist_is_refused(part: str, rows: Path, tmp_path: Path) -> None:
    refused = invoke("tokenize", rows, "--output", tmp_path / "run", "--part", part)
    assert (refused.exit_code, f"part={part!r} must be i/n" in refused.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


def test_failed_rows_are_repeated_after_the_cause_is_removed(rows: Path, media: Path, tmp_path: Path) -> None:
    run_in_process(settings(rows), tmp_path / "run")
    kept = {path: path.stat().st_ino for path in (tmp_path / "run").glob("shard-*") if "000000007" not in path.name}
    (tmp_path / "late.jpg").write_bytes((media / "2.jpg").read_bytes())
    assert run_in_process(settings(rows), tmp_path / "run").num_errors == 1, "finished shards are not repeated"
    again = tokenize(rows, "--output", tmp_path / "run", *SHARD_ROWS, "--workers", 1, "--retry-errors")
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_ino for path in kept} == kept, "shards without failed rows stay as they are"
    run_in_process(settings(rows), tmp_path / "whole")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_an_interrupted_retry_keeps_the_shards_that_it_has_written(rows: Path, media: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = run_in_process(settings(rows), folder).run
    (tmp_path / "late.jpg").write_bytes((media / "2.jpg").read_bytes())
    drop_failed(RunFolder(folder), run)
    write_shards(settings(rows), folder)  # the manifest is not written
    written_again = (folder / "shard-000000007.parquet").stat().st_ino
    assert run_in_process(settings(rows), folder).num_errors == 0
    assert (folder / "shard-000000007.parquet").stat().st_ino == written_again
