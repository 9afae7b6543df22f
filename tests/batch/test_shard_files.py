"""Tests for the files of shards: other programs can read them, and equal rows give equal files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file
from xxhash import xxh3_128_digest

from mindie_mm.batch import Dataset
from mindie_mm.batch.output import array_file, disk_writer
from mindie_mm.batch.output.array_file import BLOCK_BYTES, ArrayFile, digest_of
from mindie_mm.batch.output.disk_writer import WRITE_BATCH_BYTES, WriteBatchMemory
from mindie_mm.batch.output.journal import Journal
from mindie_mm.batch.output.shard import arrays_path
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.batch.settings import FORMAT
from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.shm import ArraySpec
from tests.batch.conftest import run, run_in_process, settings, written

SPECS = {"pixels": ArraySpec((7, 101), "uint8"), "scale": ArraySpec((3,), "float32"), "item": ArraySpec((5,), "int64")}


@pytest.fixture(scope="module")
def folder(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with three shards. The last shard has only text."""
    rows: list[dict[str, Any]] = [
        {"images": ["0.jpg", "1.jpg"], "text": "Two?"},
        {"image": "gone.jpg", "text": "None?"},
        {"video": "clip.mp4", "text": "What moves?"},
        {"image": "2.jpg", "text": "What?"},
        {"text": "Hello!"},
    ]
    folder = tmp_path_factory.mktemp("files") / "run"
    run_in_process(settings(written(media / "files.jsonl", rows), shard_rows=2), folder)
    return folder


def test_a_safetensors_reader_finds_all_arrays_by_row_and_item(folder: Path) -> None:
    dataset = Dataset(folder)
    found: dict[str, NDArray[Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    paddings = {name: found.pop(name) for name in [*found] if name.endswith(".padding")}
    assert len(paddings) == dataset.manifest.num_items
    assert not any(padding.any() for padding in paddings.values())
    for sample in dataset:
        for index, arrays in enumerate(sample.arrays):
            for name, array in arrays.items():
                assert np.array_equal(found.pop(f"{sample.row}.{index}.{name}"), array)
                assert array.flags.aligned
    assert not found
    with safe_open(arrays_path(folder, 4), framework="np") as empty:
        assert (list(empty.keys()), arrays_path(folder, 4).stat().st_size) == ([], 10)


def test_a_table_locates_each_array_without_the_header(folder: Path) -> None:
    dataset = Dataset(folder)
    for row in range(len(dataset)):
        record = dataset.record(row)
        for arrays, own in zip(record.arrays or (), dataset[row].arrays, strict=True):
            assert min(array.offset for array in arrays) % BLOCK_BYTES == 0
            for array in arrays:
                with arrays_path(folder, dataset.shard(row).info.first_row).open("rb") as file:
                    file.seek(array.offset)
                    data = file.read(array.length)
                assert (data, xxh3_128_digest(data)) == (own[array.name].tobytes(), array.digest)


@pytest.mark.parametrize("shard_rows", [2, 128])
def test_datasets_reads_a_run_of_one_shard_or_several(
    folder: Path, media: Path, tmp_path: Path, shard_rows: int
) -> None:
    datasets = pytest.importorskip("datasets")
    run_in_process(settings(media / "files.jsonl", shard_rows=shard_rows), tmp_path / "run")
    rows = datasets.load_dataset(str(tmp_path / "run"), cache_dir=str(tmp_path / "cache"))["train"]
    assert rows["row"][:] == [0, 1, 2, 3, 4]
    assert rows[3]["input_ids"] == Dataset(folder)[3].ids.tolist()
    assert rows[3]["arrays"][0][0]["offset"] == Dataset(tmp_path / "run").record(3).arrays[0][0].offset


@pytest.mark.parametrize("file", ["manifest.json", "run.json"])
def test_a_run_of_the_old_format_is_refused_with_what_to_do(
    folder: Path, media: Path, tmp_path: Path, file: str
) -> None:
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / file
    described = json.loads(path.read_text())
    described.get("run", described)["format"] = FORMAT - 1
    described["shards"] = [{"table": "a", "table_digest": "", "info": {"arena_digest": ""}}]
    path.write_text(json.dumps(described))
    with pytest.raises(
        InputError, match=rf"was written in format {FORMAT - 1}; .* Tokenize the input again, with another"
    ):
        Dataset(tmp_path / "run") if file == "manifest.json" else run(settings(media / "files.jsonl"), tmp_path / "run")


@contextmanager
def writing(path: Path, memory: WriteBatchMemory | None = None) -> Iterator[ArrayFile]:
    journal = Journal(path.with_suffix(".journal"), "run", 0)
    file = ArrayFile(path, journal, memory or WriteBatchMemory())
    try:
        yield file
    finally:
        file.close()
        journal.close()


def add(file: ArrayFile, row: int, value: int, specs: dict[str, ArraySpec] | None = None) -> ShardRow:
    """Add a row with one item, all of whose values are `value`."""
    stored, arrays = file.allocate(f"{row}.0", specs or SPECS)
    for array in arrays.values():
        array[...] = value
    added = ShardRow(row=row, id=str(row), arrays=(stored,))
    file.end_row(added)
    return added


def fill(file: ArrayFile, sizes: list[int]) -> str:
    for row, size in enumerate(sizes):
        add(file, row, row % 250, {"x": ArraySpec((size,), "uint8")})
    return file.finish()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make batches small, so that tests need little memory. Return their size in bytes."""
    monkeypatch.setattr(disk_writer, "WRITE_BATCH_BYTES", 1 << 16)
    return 1 << 16


def test_blocks_of_all_sizes_are_written_in_order(tmp_path: Path, small_batches: int) -> None:
    sizes = [small_batches * share // 10 + share for share in (3, 4, 9, 1, 12, 2, 2, 8, 11, 5, 31)]
    with writing(tmp_path / "a") as file:
        digest = fill(file, sizes)
        assert file._batch is None, "a row that is larger than a batch does not stay in memory"
        assert len(file._memory._spare) <= 2
    found = load_file(tmp_path / "a")
    for row, size in enumerate(sizes):
        assert found[f"{row}.0.x"].tolist() == [row] * size
    assert digest_of(tmp_path / "a") == digest


def test_equal_arrays_give_equal_files_whatever_the_batches(
    tmp_path: Path, small_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [small_batches * share // 10 for share in (3, 4, 9, 1, 12, 2)]
    used = WriteBatchMemory()
    for name, seconds in (("plain", 1e9), ("saved after each row", -1.0)):
        monkeypatch.setattr(array_file, "SAVE_INTERVAL_S", seconds)
        with writing(tmp_path / name, used) as file:
            fill(file, sizes)
    with writing(tmp_path / "with failed rows", used) as file:
        for row, size in enumerate(sizes):
            mark = file.mark()
            for index in range(row):
                file.allocate(f"{row}.{index}", {"x": ArraySpec((small_batches * index // 2 + 1,), "uint8")})
            file.roll_back(mark)
            add(file, row, row, {"x": ArraySpec((size,), "uint8")})
        file.finish()
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "saved after each row").read_bytes()
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "with failed rows").read_bytes()


def test_a_row_with_more_items_than_the_header_can_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_file, "HEADER_BYTES", 8192)
    with writing(tmp_path / "a") as file:
        add(file, 0, 1)
        assert not file.is_half_full
        many = {str(index): ArraySpec((1,), "uint8") for index in range(100)}
        add(file, 1, 2, {name: many[name] for name in [*many][:70]})
        assert file.is_half_full
        mark = file.mark()
        with pytest.raises(LimitExceeded, match=r"more media items than a shard can list: .* Split the row"):
            file.allocate("2.0", many)
        file.roll_back(mark)
        digest = file.finish()
    assert digest_of(tmp_path / "a") == digest


def test_a_block_without_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with writing(tmp_path / "a") as file:
        add(file, 0, 1)
        mark = file.mark()
        with monkeypatch.context() as patched:
            patched.setattr(disk_writer.mmap, "mmap", refuse)
            with pytest.raises(LimitExceeded, match=r"no memory for a block of .* bytes: Cannot allocate memory"):
                file.allocate("1.0", {"x": ArraySpec((2 * WRITE_BATCH_BYTES,), "uint8")})
        file.roll_back(mark)
        add(file, 1, 2)
        file.finish()
    assert load_file(tmp_path / "a")["1.0.scale"].tolist() == [2.0] * 3


def test_rows_are_in_the_journal_when_the_interval_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and docs promise that a killed run repeats at most the row in progress and the last 10 s."""
    assert 0 < array_file.SAVE_INTERVAL_S <= 10
    now = 1000.0
    monkeypatch.setattr(array_file, "time", SimpleNamespace(monotonic=lambda: now))

    def num_kept() -> int:
        """Return the number of rows that another call would keep if this process were killed now."""
        file._writer.wait()
        for name in ("a", "a.journal"):
            shutil.copy(tmp_path / name, tmp_path / f"copy-{name}")
        kept = 0
        with writing(tmp_path / "copy-a") as copy:
            while copy._journal.kept and copy.keep(copy._journal.kept[0].row):
                assert copy._journal.take().row == kept
                kept += 1
        return kept

    with writing(tmp_path / "a") as file:
        found, finished = list[int](), list[float]()
        for row, passed in enumerate((0, 0.9, 0.2, 0.5, 0.4, 0.2, 3, 0, 0.7, 0.7)):
            now += passed * array_file.SAVE_INTERVAL_S
            add(file, row, row + 1)
            finished.append(now)
            found.append(num_kept())
            assert all(now - at <= array_file.SAVE_INTERVAL_S for at in finished[found[-1] :])
        assert found == [0, 0, 3, 3, 3, 3, 7, 7, 7, 10], "rows are not written one by one"


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "the last line is incomplete": lambda arrays, journal: journal.write_bytes(journal.read_bytes()[:-3]),
    "the last line is not JSON": lambda arrays, journal: journal.write_bytes(
        journal.read_bytes()[:-9] + b"\0" * 8 + b"\n"
    ),
    "the arrays were not written": lambda arrays, journal: arrays.write_bytes(arrays.read_bytes()[:-4000]),
    "the arrays have other bytes": lambda arrays, journal: arrays.write_bytes(
        arrays.read_bytes()[:-3000] + b"\1" * 3000
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_of_a_journal_are_not_kept(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_file, "SAVE_INTERVAL_S", -1.0)
    arrays, journal = tmp_path / "a", tmp_path / "a.journal"
    with writing(arrays) as file:
        for row in range(3):
            add(file, row, row + 1)
    DAMAGES[damage](arrays, journal)
    kept = 0
    with writing(arrays) as file:
        while file._journal.kept and file.keep(file._journal.kept[0].row):
            assert file._journal.take().row == kept
            kept += 1
        assert kept == 2
        file._journal.kept.clear()
        add(file, 2, 3)
        file.finish()
    with writing(tmp_path / "whole") as file:
        for row in range(3):
            add(file, row, row + 1)
        file.finish()
    assert arrays.read_bytes() == (tmp_path / "whole").read_bytes()
