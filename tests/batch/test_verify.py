"""Tests for `mindie-mm verify`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mindie_mm.batch import Dataset
from mindie_mm.batch.input.files import file_digest
from mindie_mm.cli import main
from mindie_mm.errors import InputError
from tests.batch.conftest import content, run, run_in_process, settings

TABLES = ("shard-000000000.parquet", "shard-000000004.parquet")
ARRAYS = ("shard-000000000.safetensors", "shard-000000004.safetensors")


@pytest.fixture
def folder(eight_rows: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(eight_rows, tmp_path / "run"))


def verify(folder: Path, status: int = 1) -> list[str]:
    shown = CliRunner().invoke(main, ["verify", str(folder)])
    assert shown.exit_code == status, shown.output
    return shown.stdout.splitlines()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def forge(folder: Path, change: Mapping[str, Any]) -> None:
    """Change values in row 1 of the first table, and record the changed table in the manifest."""
    path = folder / TABLES[0]
    table, info = pq.read_table(path), pq.read_metadata(path).metadata[b"mindie_mm"]
    rows = table.to_pylist()
    rows[1] |= change
    forged = pa.Table.from_pylist(rows, table.schema.with_metadata({b"mindie_mm": info}))
    pq.write_table(forged, path)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["shards"][0]["table_digest"] = file_digest(path)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))


def test_an_intact_run_is_verified_without_torch(folder: Path) -> None:
    program = f"""
import sys
from mindie_mm.cli import main
main(["verify", {str(folder)!r}], standalone_mode=False)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:11]) == (0, "8 rows and "), done.stderr
    assert done.stderr.startswith("8 rows, 0 failed, "), "the progress"


def test_the_damaged_rows_are_named_and_only_their_shard_is_repaired(folder: Path, eight_rows: Path) -> None:
    record = Dataset(folder).record(5)
    for item in record.arrays:
        flip(folder / ARRAYS[1], item[0].offset)
    flip(folder / ARRAYS[1], Dataset(folder).record(6).arrays[0][0].offset)
    intact = (folder / TABLES[0]).stat().st_mtime_ns
    damage, *_, remove = verify(folder)
    assert damage == (
        f"rows 5 to 6: {folder / ARRAYS[1]} does not have the array 5.0.{record.arrays[0][0].name} that its table "
        "describes"
    )
    assert remove == f"    {folder / TABLES[1]}"
    Path(remove.strip()).unlink()
    run_in_process(settings(eight_rows.parent / "rows.jsonl", shard_rows=4), folder)
    assert content(folder) == content(eight_rows)
    assert (folder / TABLES[0]).stat().st_mtime_ns == intact
    verify(folder, 0)


def test_every_damaged_file_is_named(folder: Path) -> None:
    flip(folder / TABLES[0], 100)
    (folder / ARRAYS[0]).unlink()
    arrays = folder / ARRAYS[1]
    flip(arrays, arrays.stat().st_size - 1)  # in a padding
    shutil.copy(folder / TABLES[1], folder / "shard-000000009.parquet")
    damages = verify(folder)
    expected = (
        f"{folder}/shard-000000009.parquet is not a file of this run, but other programs would read it",
        f"rows 0 to 3: {folder / TABLES[0]} is not the file that the run wrote",
        f"rows 0 to 3: {folder / ARRAYS[0]} cannot be read: No such file or directory",
        f"rows 4 to 7: {arrays} is not the file that the run wrote",
    )
    for damage, start in zip(damages, expected, strict=False):
        assert damage.startswith(start)
    assert damages[len(expected)].startswith("To repair the run, ")
    flip(arrays, 9)
    assert "has a damaged header" in verify(folder)[3]
    for path in folder.glob("*.parquet"):
        path.unlink()
    assert verify(folder)[-2].startswith("To repair the run, run the command"), "there is no file to remove"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"row": 3}, f"rows 0 to 3: .../{TABLES[0]} has the row 3 at the place of row 1"),
        ({"input_ids": [1] * 999}, f"rows 0 to 3: .../{TABLES[0]} is damaged: num_tokens is "),
        ({"arrays": [[{"name": "x", "offset": 0}]]}, "rows 0 to 3: row 1 is damaged: "),
    ],
)
def test_a_forged_table_is_compared_with_the_arrays(change: Mapping[str, Any], reason: str, folder: Path) -> None:
    forge(folder, change)
    assert verify(folder)[0].startswith(reason.replace("...", str(folder)))


def test_offsets_and_digests_of_a_forged_table_are_compared_with_the_header(folder: Path) -> None:
    arrays = pq.read_table(folder / TABLES[0])["arrays"][1].as_py()
    for name, value in (("offset", arrays[0][0]["offset"] + 4096), ("digest", bytes(16)), ("dtype", "int8")):
        forge(folder, {"arrays": [[arrays[0][0] | {name: value}, *arrays[0][1:]]]})
        assert verify(folder)[0].startswith(f"row 1: {folder / ARRAYS[0]} does not have the array 1.0.")
    forge(folder, {"arrays": [arrays[0][1:]]})
    assert verify(folder)[0].endswith(f"has the array 1.0.{arrays[0][0]['name']}, which its table does not list")


def test_totals_and_gaps_are_checked(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest | {"num_tokens": 7}))
    total = manifest["num_tokens"]
    assert verify(folder)[0] == f"{folder}/manifest.json is damaged: num_tokens is 7, but the shards have {total}"
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest | {"shards": manifest["shards"][1:]}))
    shown = CliRunner().invoke(main, ["verify", str(folder)])
    assert (shown.exit_code, "its shards do not contain exactly the rows 0 to 7. Remove" in shown.stderr) == (1, True)


LOST: dict[str, bytes | None] = {"is gone": None, "is empty": b"", "is {}": b"{}", "is no text": b"\xff\n"}


@pytest.mark.parametrize("change", LOST)
@pytest.mark.parametrize("name", ["run.json", "errors.jsonl", "README.md"])
def test_every_other_file_of_a_run_is_checked_and_repaired(
    name: str, change: str, folder: Path, eight_rows: Path
) -> None:
    changed = LOST[change]
    if changed is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(changed)
    damage, repair, _, *removed = verify(folder)
    assert damage.startswith(f"{folder / name} "), damage
    assert removed == ([] if changed is None else [f"    {folder / name}"])
    assert ("remove these files" in repair) == bool(removed)
    run(settings(eight_rows.parent / "rows.jsonl", shard_rows=4), folder)
    assert content(folder) == content(eight_rows)
    verify(folder, 0)


def test_descriptions_and_lists_of_another_run_are_damages(folder: Path) -> None:
    run = json.loads((folder / "run.json").read_bytes())
    run["settings"]["max_tokens"] = 99
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    failed = json.loads((folder / "errors.jsonl").read_bytes())
    for other in ({"row": 3}, {"error": "InputError: another"}, {"id": "r3"}):
        (folder / "errors.jsonl").write_bytes(msgspec.json.encode(failed | other) + b"\n")
        assert verify(folder)[:2] == [
            f"{folder}/run.json describes the run otherwise than manifest.json",
            f"{folder}/errors.jsonl is not the list of the 1 failed rows that the tables have",
        ]
    (folder / "errors.jsonl").write_bytes(b"")
    assert f"{folder}/errors.jsonl has 0 rows, but 1 row failed" in verify(folder)


def test_a_damaged_description_of_an_unfinished_run_can_be_removed(
    folder: Path, eight_rows: Path, tmp_path: Path
) -> None:
    for name in ("manifest.json", TABLES[1]):  # the state of a repeated run that was interrupted
        (folder / name).unlink()
    intact = (folder / TABLES[0]).stat().st_mtime_ns
    (folder / "run.json").write_bytes(b"{}")
    given = settings(eight_rows.parent / "rows.jsonl", shard_rows=4)
    with pytest.raises(
        InputError, match=r"run\.json does not describe a run .*\. Remove this file, and run the command"
    ):
        run(given, folder)
    (folder / "run.json").unlink()
    run_in_process(given, folder)
    assert content(folder) == content(eight_rows)
    assert (folder / TABLES[0]).stat().st_mtime_ns == intact, "the shard is kept"
    (tmp_path / "own").mkdir()
    (tmp_path / "own/README.md").touch()
    with pytest.raises(InputError, match=r"does not contain a run, but has other files, such as README\.md"):
        run(given, tmp_path / "own")
