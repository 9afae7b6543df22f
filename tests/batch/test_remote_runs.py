"""Tests that read a finished run in an object store: fsspec's memory file system, and a real S3 server."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader

from mindie_mm import generate_dataset
from mindie_mm.batch import Dataset
from mindie_mm.cli import main
from mindie_mm.errors import CorruptReference, InputError, StorageError

URL = "memory://runs/run/"
TABLE, ARRAYS = "shard-000000000.parquet", "shard-000000000.safetensors"
ROWS_WITH_ARRAYS = 6


def upload(run: Path, url: str) -> Any:
    """Upload the folder of a run, and return the file system."""
    system, path = fsspec.core.url_to_fs(url)
    for file in run.iterdir():
        system.pipe(f"{path}/{file.name}", file.read_bytes())
    return system


@pytest.fixture
def store(eight_rows: Path) -> Iterator[Any]:
    """Return fsspec's memory file system with a run. It is empty after the test."""
    system = upload(eight_rows, URL)
    yield system
    system.rm("/runs", recursive=True)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Return a list to which each request to the memory file system adds the file and the size of the range."""
    made: list[tuple[str, int | None]] = []
    fetch = MemoryFileSystem.cat_file

    def counted(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        made.append((Path(path).name, None if start is None or end is None else end - start))
        return fetch(self, path, start, end, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    return made


@pytest.fixture
def failing(store: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Return a function that lets each later request to the memory file system fail with an exception."""

    def fail(error: Exception) -> None:
        def failed(*_: object, **__: object) -> bytes:
            raise error

        for name in ("cat_file", "info", "_open"):
            monkeypatch.setattr(MemoryFileSystem, name, failed)

    return fail


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def require_equal_samples(found: Any, expected: Any) -> None:
    for one, own in zip(found, expected, strict=True):
        assert (one.row, one.id, one.error, one.columns, one.spans) == (
            own.row,
            own.id,
            own.error,
            own.columns,
            own.spans,
        )
        assert own.ids is None or np.array_equal(one.ids, own.ids)
        for arrays, others in zip(one.arrays, own.arrays, strict=True):
            assert arrays.keys() == others.keys()
            for name, array in arrays.items():
                assert array.dtype == others[name].dtype
                assert np.array_equal(array, others[name])


def require_equal_batches(found: Dataset, own: Dataset) -> None:
    """Compare a whole batch. Tests fail at warnings, such as that of torch about arrays that cannot be written."""
    rows = [row for row in own.order(seed=1) if own[row].error is None]
    batch, expected = (each.collate(each.__getitems__(rows), labels="all") for each in (found, own))
    assert batch.keys() == expected.keys()
    for name, array in batch.items():
        assert array.equal(expected[name])
        array.add_(0)


@pytest.mark.usefixtures("store")
def test_a_remote_run_is_read_as_a_local_run(eight_rows: Path, requests: list[tuple[str, int | None]]) -> None:
    dataset, own = Dataset(URL), Dataset(eight_rows)
    assert (len(dataset), dataset.manifest, [*dataset.order(3)]) == (8, own.manifest, [*own.order(3)])
    assert [name for name, _ in requests] == ["manifest.json", "errors.jsonl"]
    requests.clear()
    require_equal_samples(dataset, own)
    assert sorted(name for name, size in requests if size is None) == [TABLE, "shard-000000004.parquet"]
    ranges = [size for _, size in requests if size is not None]
    stored = [array for row in range(8) for arrays in own.record(row).arrays or () for array in arrays]
    assert len(ranges) == ROWS_WITH_ARRAYS
    assert sum(array.length for array in stored) <= sum(ranges) < sum(array.length for array in stored) + 4096
    requests.clear()
    require_equal_samples([dataset[5], dataset[-1], *dataset[3:5]], [own[5], own[-1], *own[3:5]])
    assert [size is None for _, size in requests] == [False] * 3, "row 4 is a text, and the tables are kept"
    assert not any(array.flags.writeable for arrays in dataset[5].arrays for array in arrays.values())
    require_equal_batches(dataset, own)
    require_equal_samples([pickle.loads(pickle.dumps(dataset))[6]], [own[6]])
    with pytest.raises(IndexError, match="there is no row 8"):
        dataset[8]


@pytest.mark.usefixtures("store")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with one core
def test_forked_workers_read_a_remote_run(eight_rows: Path) -> None:
    dataset = Dataset(URL)
    dataset[0]
    loader = DataLoader(dataset, batch_size=3, num_workers=2, collate_fn=list, multiprocessing_context="fork")
    require_equal_samples([sample for batch in loader for sample in batch], Dataset(eight_rows))


def changed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "no arrays": (ARRAYS, lambda _: None, "cannot be read: No such file or directory"),
    "arrays cut in the row": (ARRAYS, lambda content: content[:530_000], "has 530000 bytes, but the run wrote "),
    "arrays cut before the row": (ARRAYS, lambda content: content[:9], "has 9 bytes, but the run wrote "),
    "another array": (ARRAYS, lambda content: changed(content, 530_000), "the array pixel_values of row 0 has another"),
    "no table": (TABLE, lambda _: None, "cannot be read: No such file or directory"),
    "table cut": (TABLE, lambda content: content[:-9], "is not the file that the run wrote: its digest is"),
    "another table": (TABLE, lambda content: changed(content, 100), "is not the file that the run wrote: its digest"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_object_is_noticed(damage: str, store: Any) -> None:
    name, change, reason = DAMAGES[damage]
    content = change(store.cat_file(f"/runs/run/{name}"))
    if content is None:
        store.rm(f"/runs/run/{name}")
    else:
        store.pipe(f"/runs/run/{name}", content)
    with pytest.raises(CorruptReference) as refused:
        Dataset(URL)[0]
    assert str(refused.value).startswith(f"{URL}{name} ")
    assert reason in str(refused.value)
    assert Dataset(URL)[6].row == 6, "the other shard is intact"
    shown = invoke("inspect", URL, 0)
    assert (shown.exit_code, f"Error: {refused.value}" in shown.stderr) == (1, True), shown.output
    verified = invoke("verify", URL)
    assert (verified.exit_code, f"{URL}{name} " in verified.stdout) == (1, True), verified.output
    kept = "To repair the run, run" if damage == "no table" else f"    {URL}{TABLE}"
    assert kept in verified.stdout


@pytest.mark.parametrize("error", [PermissionError("Access Denied"), RuntimeError("no endpoint"), TimeoutError("late")])
def test_errors_of_the_store_name_the_url(error: Exception, failing: Callable[[Exception], None]) -> None:
    opened, reason = Dataset(URL), str(error)
    failing(error)
    with pytest.raises(StorageError, match=rf"{URL}{TABLE} cannot be read: .*{reason}"):
        opened[0]
    with pytest.raises(InputError, match=rf"{URL}manifest\.json cannot be read: .*{reason}"):
        Dataset(URL)
    for command in (("verify", URL), ("inspect", URL)):
        shown = invoke(*command)
        assert (shown.exit_code, f"{URL}manifest.json cannot be read" in shown.stderr) == (2, True), shown.output


def test_an_outage_is_not_taken_for_damage(
    store: Any, failing: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Dataset(URL)
    opened.record(0)
    table = store.cat_file(f"/runs/run/{TABLE}")
    failing(TimeoutError("late"))
    with pytest.raises(StorageError, match=f"{ARRAYS} cannot be read: late"):
        opened[0]
    manifest = opened.manifest
    monkeypatch.setattr("mindie_mm.batch.output.manifest.Manifest.read", lambda _: manifest)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_: table)
    shown = invoke("verify", URL)
    assert (shown.exit_code, f"{URL}{ARRAYS} cannot be read: late" in shown.stderr) == (1, True), shown.output


@pytest.mark.usefixtures("store")
def test_the_commands_read_a_remote_run(eight_rows: Path) -> None:
    assert invoke("verify", URL).stdout == invoke("verify", eight_rows).stdout
    for row in ((), (2,), (5,)):
        shown = invoke("inspect", URL, *row)
        assert (shown.exit_code, shown.stdout) == (0, invoke("inspect", eight_rows, *row).stdout)
    missing = invoke("inspect", URL, 8)
    assert (missing.exit_code, f"there is no row 8: {URL} has 8 rows" in missing.stderr) == (2, True)


def test_the_url_of_a_run_is_never_taken_for_a_path(
    eight_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run exists at the path that looks like the URL."""
    shutil.copytree(eight_rows, tmp_path / "memory:/gone/run")
    monkeypatch.chdir(tmp_path)
    refusal = "memory://gone/run does not contain a finished run: there is no manifest.json"
    with pytest.raises(InputError, match=refusal):
        Dataset("memory://gone/run")
    with pytest.raises(InputError, match=refusal):
        generate_dataset("memory://gone/run", tmp_path / "out.jsonl")
    output = ("--output", tmp_path / "out.jsonl")
    for command in (("verify",), ("inspect",), ("generate", *output, "--tokenized")):
        refused = invoke(*command, "memory://gone/run")
        assert (refused.exit_code, refusal in refused.stderr) == (2, True), refused.output
    assert "Protocol not known: nothing" in invoke("verify", "nothing://gone/run").stderr


@pytest.mark.slow
def test_generate_reads_a_remote_run(store: Any, eight_rows: Path, tmp_path: Path) -> None:
    """If an array of a row has changed, the rows before it are answered. Restoring the object continues the run."""
    for url, out in ((eight_rows, "local"), (URL, "remote")):
        assert generate_dataset(url, tmp_path / out, max_tokens=4) == (8, 1)
    assert (tmp_path / "remote").read_bytes() == (tmp_path / "local").read_bytes()
    path = "/runs/run/shard-000000004.safetensors"
    content, at = store.cat_file(path), Dataset(URL).record(6).arrays[0][0].offset
    store.pipe(path, changed(content, at))
    arguments = ("generate", "--tokenized", URL, "--output", tmp_path / "again", "--max-tokens", 4)
    stopped = invoke(*arguments)
    assert (stopped.exit_code, f"{URL}shard-000000004.safetensors was changed" in stopped.stderr) == (3, True)
    rows = [json.loads(line)["row"] for line in (tmp_path / "again").read_text().splitlines()]
    assert rows == [0, 1, 2, 3, 4, 5]
    store.pipe(path, content)
    assert invoke(*arguments).exit_code == 1
    assert (tmp_path / "again").read_bytes() == (tmp_path / "local").read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with one core
def test_a_run_is_read_from_a_real_s3_server(eight_rows: Path, s3_server: Any) -> None:
    """Workers are forked after this process has connected to the server, or begin with nothing."""
    url = "s3://bucket/a run/"
    store, own = upload(eight_rows, url), Dataset(eight_rows)
    dataset = Dataset(url)
    require_equal_samples(dataset, own)
    require_equal_batches(dataset, own)
    order = dataset.order(seed=2)
    for method in ("fork", "spawn"):
        loader = DataLoader(
            dataset,
            batch_size=3,
            sampler=order,
            num_workers=2,
            collate_fn=partial(dataset.collate, labels="all"),
            multiprocessing_context=method,
        )
        expected = DataLoader(own, batch_size=3, sampler=order, collate_fn=partial(own.collate, labels="all"))
        for batch, other in zip(loader, expected, strict=True):
            assert {name: array.tolist() for name, array in batch.items()} == {
                name: array.tolist() for name, array in other.items()
            }
    require_equal_samples(dataset, own)
    assert invoke("verify", url).stdout.endswith("are intact\n")
    store.pipe(f"bucket/a run/{ARRAYS}", b"{}")
    with pytest.raises(CorruptReference, match=f"{ARRAYS} has 2 bytes, but the run wrote"):
        dataset[0]
    store.rm(f"bucket/a run/{ARRAYS}")
    with pytest.raises(CorruptReference, match=f"{ARRAYS} cannot be read: No such file"):
        dataset[0]
    with pytest.raises(InputError, match="does not contain a finished run"):
        Dataset("s3://no-bucket/run")
    s3_server.stop()
    with pytest.raises(StorageError, match=r"safetensors cannot be read: .*connect"):
        dataset[6]
    with pytest.raises(InputError, match=r"s3://bucket/a run/manifest\.json cannot be read: .*connect"):
        Dataset(url)
