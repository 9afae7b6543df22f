"""Tests for damaged, exchanged and forged shards. Reading such a shard raises an error that names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from mindie_mm.batch import Dataset
from mindie_mm.batch.output.shard import SCHEMA
from mindie_mm.cli import main
from mindie_mm.errors import CorruptReference, InputError
from tests.batch.conftest import content, run, run_in_process, settings, written

TABLE, ARRAYS = "shard-000000000.parquet", "shard-000000000.safetensors"


@pytest.fixture(scope="module")
def whole(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"inputs": [{"image": f"{i}.jpg"}, {"text": "What?"}]} for i in range(3)]
    folder = tmp_path_factory.mktemp("damage") / "run"
    run_in_process(settings(written(media / "damage.jsonl", rows)), folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def rewritten(folder: Path, **columns: Callable[[Any], Any]) -> None:
    """Rewrite the table: apply each function in `columns` to the column of the same name. Keep the metadata."""
    table = pq.read_table(folder / TABLE)
    rows = [row | {name: change(row[name]) for name, change in columns.items()} for row in table.to_pylist()]
    metadata = {b"mindie_mm": pq.read_metadata(folder / TABLE).metadata[b"mindie_mm"]}
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA.with_metadata(metadata)), folder / TABLE)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def of_array(**values: Any) -> Callable[[Any], Any]:
    """Return a function that replaces values of the first array of each item."""
    return lambda items: [[arrays[0] | values, *arrays[1:]] for arrays in items]


def of_span(**bounds: int) -> Callable[[Any], Any]:
    return lambda spans: [span | bounds for span in spans]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no arrays": lambda folder: (folder / ARRAYS).unlink(),
    "arrays cut": lambda folder: cut(folder / ARRAYS, 600_000),
    "arrays empty": lambda folder: cut(folder / ARRAYS, 0),
    "no table": lambda folder: (folder / TABLE).unlink(),
    "table cut": lambda folder: cut(folder / TABLE, 1000),
    "foreign table": lambda folder: pq.write_table(pa.table({"a": [1]}), folder / TABLE),
    "fewer rows": lambda folder: pq.write_table(pq.read_table(folder / TABLE)[:1], folder / TABLE),
    "no ids": lambda folder: rewritten(folder, input_ids=lambda _: None),
    "no spans": lambda folder: rewritten(folder, spans=lambda _: None),
    "array outside": lambda folder: rewritten(folder, arrays=of_array(offset=10**9)),
    "array before": lambda folder: rewritten(folder, arrays=of_array(offset=-8)),
    "array longer": lambda folder: rewritten(folder, arrays=of_array(shape=[10**6])),
    "array of objects": lambda folder: rewritten(folder, arrays=of_array(dtype="object")),
    "fewer items": lambda folder: rewritten(folder, arrays=lambda _: []),
    "span outside": lambda folder: rewritten(folder, spans=of_span(stop=10**6)),
    "span below": lambda folder: rewritten(folder, spans=of_span(start=-4)),
    "span backwards": lambda folder: rewritten(folder, spans=of_span(start=9, stop=4)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_reading_damaged_files_raises_an_error(damage: str, folder: Path, tmp_path: Path) -> None:
    DAMAGES[damage](folder)
    with pytest.raises(CorruptReference):
        list(Dataset(folder))
    shown = invoke("inspect", folder, 1, "--png", tmp_path / "row.png")
    assert (shown.exit_code, shown.stderr[:7]) == (1, "Error: "), shown
    assert str(folder / "shard-") in shown.stderr
    assert not (tmp_path / "row.png").exists()
    verified = invoke("verify", folder)
    assert (verified.exit_code, verified.stdout[:12]) == (1, "rows 0 to 2:"), verified.output


@pytest.mark.parametrize("damage", ["array outside", "span below"])
def test_a_damaged_row_does_not_affect_other_rows_of_its_table(damage: str, folder: Path) -> None:
    rewritten(folder)
    whole = pq.read_table(folder / TABLE)
    DAMAGES[damage](folder)
    pq.write_table(pa.concat_tables([pq.read_table(folder / TABLE)[:1], whole[1:]]), folder / TABLE)
    dataset = Dataset(folder)
    for _ in range(2):
        with pytest.raises(CorruptReference, match=r"row 0\b"):
            dataset[0]
        assert [dataset[row].row for row in (1, 2)] == [1, 2]


@pytest.mark.slow
def test_a_changed_pixel_is_detected_before_it_is_used(folder: Path, tmp_path: Path) -> None:
    flip(folder / ARRAYS, (folder / ARRAYS).stat().st_size - 9000)
    generate = ("generate", "--tokenized", folder, "--output", tmp_path / "out.jsonl")
    for command, status in ((("inspect", folder, 1), 1), (generate, 3)):
        shown = invoke(*command)
        assert shown.exit_code == status
        assert f"{ARRAYS} is not the file that the run wrote: its digest is" in shown.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_an_exchanged_table_is_detected_before_it_is_used(folder: Path, tmp_path: Path) -> None:
    rewritten(folder, arrays=of_array(offset=2**19))
    shown = invoke("inspect", folder, 1, "--png", tmp_path / "row.png")
    assert shown.exit_code == 1
    assert f"{TABLE} is not the file that the run wrote: its digest is" in shown.stderr


@pytest.mark.slow
def test_another_call_replaces_an_exchanged_table(
    folder: Path, whole: Path, media: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewritten(folder, id=lambda _: "another")
    run_in_process(settings(media / "damage.jsonl"), folder)
    assert f"{folder / TABLE} is not the file that the run wrote: its digest is" in caplog.text
    assert content(folder) == content(whole)


@pytest.mark.parametrize("size", [0, 5000, -4096])
def test_another_call_rebuilds_truncated_arrays(size: int, folder: Path, whole: Path, media: Path) -> None:
    cut(folder / ARRAYS, size)
    run_in_process(settings(media / "damage.jsonl"), folder)
    assert content(folder) == content(whole)


def test_another_call_does_not_repair_a_damaged_manifest(folder: Path, media: Path) -> None:
    cut(folder / "manifest.json", 100)
    with pytest.raises(CorruptReference, match=r"manifest\.json is damaged"):
        run(settings(media / "damage.jsonl"), folder)
    assert (folder / "manifest.json").stat().st_size == 100


@pytest.mark.parametrize(
    "harm",
    [
        lambda manifest: manifest.write_bytes(b"\xff{"),
        lambda manifest: manifest.write_text("{}"),
        lambda manifest: manifest.write_text(manifest.read_text().replace('"num_rows": 3', '"num_rows": 4', 1)),
        lambda manifest: manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"shards": []})),
    ],
)
def test_a_damaged_manifest_is_refused(harm: Callable[[Path], object], folder: Path) -> None:
    harm(folder / "manifest.json")
    with pytest.raises(CorruptReference, match=r"manifest\.json is damaged"):
        Dataset(folder)
    assert invoke("inspect", folder).exit_code == 1
    assert invoke("generate", "--tokenized", folder, "--output", folder / "out.jsonl").exit_code == 3


def test_a_run_of_another_format_is_not_called_damaged(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["run"]["format"] = 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="was written in format 1; only format 4 is supported"):
        Dataset(folder)


def test_a_path_without_a_run_and_a_missing_row_are_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not contain a finished run"):
        Dataset(tmp_path)
    with pytest.raises(InputError, match=r"manifest.json is a file. Give the folder of a finished run"):
        Dataset(whole / "manifest.json")
    shown = invoke("inspect", whole, 3)
    assert (shown.exit_code, shown.stderr.splitlines()[-1]) == (
        2,
        f"Error: there is no row 3: {whole} has 3 rows, numbered from 0",
    )


@pytest.mark.parametrize("out", ["gone/out", "."])
def test_an_output_that_cannot_be_written_is_reported(out: str, whole: Path, tmp_path: Path) -> None:
    shown = invoke("inspect", whole, 1, "--png", tmp_path / out)
    assert (shown.exit_code, "cannot be written: " in shown.stderr) == (1, True)
    shown = invoke("generate", "--tokenized", whole, "--output", tmp_path / out)
    assert (shown.exit_code, "cannot be written: " in shown.stderr) == (2, True)


def test_answers_cannot_go_to_a_pipe(whole: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    shown = invoke("generate", "--tokenized", whole, "--output", tmp_path / "pipe")
    assert (shown.exit_code, "pipe cannot be written: File or stream is not seekable" in shown.stderr) == (2, True)
