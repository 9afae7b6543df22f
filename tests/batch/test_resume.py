"""Tests that a run that is killed at any step and then resumed writes the same bytes as an undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from mindie_mm.batch import stage
from mindie_mm.batch.batch_messages import Step
from mindie_mm.batch.input.source import chunks
from mindie_mm.batch.output import array_file
from mindie_mm.batch.output.disk_writer import WriteBatchMemory
from mindie_mm.batch.output.journal import forget_failures
from mindie_mm.batch.output.run_folder import RunFolder
from mindie_mm.batch.output.shard import ShardWriter, table_path
from mindie_mm.batch.run import require_run
from mindie_mm.batch.settings import Run, Settings
from mindie_mm.batch.tally import Tally
from mindie_mm.errors import InputError, StorageError
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


@pytest.fixture(autouse=True)
def rows_are_saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_file, "SAVE_INTERVAL_S", -1.0)


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


def kill_at(point: str, given: Settings, folder: Path) -> None:
    """Begin a run in `folder`/run, and kill it at a point."""
    trigger = folder / f"batch.{point}"
    trigger.touch()
    killed = os.fork()
    if not killed:
        try:
            faults.arm("batch", folder)
            run_in_process(given, folder / "run")
        finally:
            os._exit(1)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    assert not trigger.exists()


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the numbers of rows are appended when they are tokenized."""
    rows: list[int] = []
    begin_row = stage._ShardStore.begin_row

    def counted(store: stage._ShardStore, row: int, file: array_file.ArrayFile) -> None:
        rows.append(row)
        begin_row(store, row, file)

    monkeypatch.setattr(stage._ShardStore, "begin_row", counted)
    return rows


@pytest.mark.parametrize("limits", [{}, {"shard_bytes": 1}])
def test_a_killed_run_repeats_only_the_row_in_progress(
    limits: dict[str, int], few: Path, tokenized: list[int], tmp_path: Path
) -> None:
    """The first three rows are kept, also if each of them is a shard. The last saved row may be repeated."""
    given = settings(few, **limits)
    kill_at("row 5", given, tmp_path)
    run_in_process(given, tmp_path / "run")
    assert tokenized in ([5, 6, 7], [6, 7])
    run_in_process(given, tmp_path / "whole")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_kept_rows_count_as_rows_of_an_earlier_call(few: Path, tmp_path: Path) -> None:
    given, shown = settings(few), list[tuple[int, int]]()
    sources = given.sources(tmp_path)
    tally = Tally(
        Run.of(given, tmp_path),
        RunFolder(tmp_path),
        sources,
        None,
        lambda done, earlier: shown.append((done.rows, earlier.rows)),
    )
    for row in range(3):
        tally.add_step(next(iter(chunks(sources, 7, None))), Step(row, 4096, is_kept=row < 2))
    assert shown == [(0, 0), (1, 1), (2, 2), (3, 2)]


def test_rows_that_have_changed_since_they_were_saved_are_not_kept(
    few: Path, tokenized: list[int], tmp_path: Path
) -> None:
    kill_at("row 5", settings(few), tmp_path)
    journal = tmp_path / "run/shard-000000000.journal"
    head, *lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 5
    digest = msgspec.json.decode(lines[2])["records_digest"].encode()
    journal.write_bytes(head + b"".join(lines).replace(digest, b"0" * len(digest)))
    run_in_process(settings(few), tmp_path / "run")
    assert tokenized == [2, 3, 4, 5, 6, 7]


def test_a_row_that_stopped_a_run_is_tried_again(few: Path, tokenized: list[int], tmp_path: Path) -> None:
    """The command tells the user to correct the row. Earlier rows are kept."""
    kill_at("row 5", settings(few), tmp_path)
    forget_failures(tmp_path / "run")
    run_in_process(settings(few), tmp_path / "run")
    assert tokenized == [3, 4, 5, 6, 7]


def test_a_shard_has_only_one_writer(tmp_path: Path) -> None:
    memory = WriteBatchMemory()
    with (
        ShardWriter(tmp_path, "run", 0, 1, memory),
        pytest.raises(StorageError, match=r"journal cannot be locked: another process is writing the shard"),
    ):
        ShardWriter(tmp_path, "run", 0, 1, memory)
    ShardWriter(tmp_path, "run", 0, 1, memory).__exit__()


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_any_point_resumes_to_the_same_bytes(
    point: str, few: Path, whole: Path, tmp_path: Path
) -> None:
    kill_at(point, settings(few), tmp_path)
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


def test_files_that_are_not_part_of_the_run_are_removed_at_the_end(few: Path, whole: Path, tmp_path: Path) -> None:
    """Killed actors leave such files, and users may copy them from another node with its shards."""
    (tmp_path / "run").mkdir()
    for name in ("at-3.json", "input-000.jsonl.0123abcd.partial", "shard-000000003.parquet", "shard-000000003.journal"):
        (tmp_path / "run" / name).write_text("{}")
    require_run(RunFolder(tmp_path / "run"))
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


@pytest.mark.parametrize("place", [0.3, 0.9, None])
def test_a_damaged_table_is_rebuilt(place: float | None, few: Path, whole: Path, tmp_path: Path) -> None:
    """A bit of a column or of the footer is flipped, or the end of the table is missing."""
    run_in_process(settings(few), tmp_path / "run")
    (tmp_path / "run/manifest.json").unlink()
    table = table_path(tmp_path / "run", 0)
    data = bytearray(table.read_bytes())
    if place is None:
        del data[-9:]
    else:
        data[int(len(data) * place)] ^= 1
    table.write_bytes(data)
    run_in_process(settings(few), tmp_path / "run")
    assert content(tmp_path / "run") == content(whole)
