"""Tests for runs on a Ray cluster of two nodes, simulated on one machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindie_mm.batch import Dataset, on_ray
from mindie_mm.batch.input.gather import gather, gathered_path
from mindie_mm.batch.input.source import Chunk, chunks
from mindie_mm.batch.output.run_folder import Address, StagedFolder
from mindie_mm.batch.output.shard import complete_shards
from mindie_mm.batch.run import run_batch
from mindie_mm.batch.settings import Run, Settings
from mindie_mm.errors import InputError, ProcessDied, StorageError
from mindie_mm.processes.ipc import Failure
from tests.batch.conftest import content, run, run_in_process, settings, written
from tests.batch.deadly import Deadly

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    two_nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    two_nodes.add_node(num_cpus=1)
    two_nodes.connect(namespace="mindie_mm")
    yield two_nodes
    ray.shutdown()
    two_nodes.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings that Ray's own code causes
@pytest.mark.parametrize("sandbox", [False, True])
def test_two_nodes_write_the_same_files_as_one_machine(cluster, lines, tmp_path, sandbox):
    run(settings(lines), tmp_path / "here")
    run(settings(lines), tmp_path / "there", ray_address=cluster.address, sandbox=sandbox)
    assert content(tmp_path / "there") == content(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nodes_write_to_a_store_without_a_shared_folder(cluster, lines, tmp_path, monkeypatch):
    """The folders of the nodes are removed before the command removes its own, which contains them on this machine."""
    left = list[Path]()

    def finish(folder: StagedFolder, *names: str, shards: Any) -> None:
        left.extend(folder.path.glob("node*"))
        finish_of(folder, *names, shards=shards)

    finish_of = StagedFolder.finish
    monkeypatch.setattr(StagedFolder, "finish", finish)
    run(settings(lines), tmp_path / "here")
    store, staging = tmp_path / "store", tmp_path / "staging"
    run_batch(settings(lines), f"local://{store}", ray_address=cluster.address, staging=staging)
    stored = {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}
    stored.pop("timings.jsonl", None)
    assert stored == content(tmp_path / "here")
    assert ([*staging.iterdir()], left) == ([], [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_data_reads_a_run_of_several_shards(cluster, lines, rows, tmp_path):
    run_in_process(settings(lines), tmp_path / "run")
    found = sorted(ray.data.read_parquet(str(tmp_path / "run")).take_all(), key=lambda row: row["row"])
    assert [row["row"] for row in found] == [*range(len(rows))]
    samples = [sample for sample in Dataset(tmp_path / "run") if sample.error is None]
    assert [[*row["input_ids"]] for row in found if row["error"] is None] == [sample.ids.tolist() for sample in samples]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nodes_get_the_list_of_a_media_folder_from_the_driver(cluster, media, tmp_path, monkeypatch):
    """The list is sent in several pieces, the output folder is a relative path, and each task has several chunks."""
    only = tmp_path / "media"
    only.mkdir()
    for index in range(4):
        (only / f"{index}.jpg").write_bytes((media / f"{index}.jpg").read_bytes())
    given = settings(only, shard_rows=1)
    run_in_process(given, tmp_path / "here")
    pieces, shards = on_ray._pieces, on_ray.shards
    aside: dict[Path, Path] = {}

    def hidden(path: Path) -> Iterator[bytes]:
        """Hide the driver's list from the nodes, which in this test have the same file system."""
        yield from pieces(path)
        aside[path] = path.rename(tmp_path / path.name)

    def restored(*arguments: Any, **named: Any) -> Iterator[Any]:
        yield from shards(*arguments, **named)
        for path, list_of_driver in aside.items():
            list_of_driver.replace(path)

    monkeypatch.setattr(on_ray, "_pieces", hidden)
    monkeypatch.setattr(on_ray, "shards", restored)
    monkeypatch.setattr(on_ray, "_PIECE_BYTES", 100)
    monkeypatch.setattr(on_ray, "_MOST_BLOCKS", 3)
    monkeypatch.chdir(tmp_path)
    run(given, Path("there"), num_workers=2, ray_address=cluster.address)
    assert content(tmp_path / "there") == content(tmp_path / "here")


@pytest.fixture
def begun(media: Path, tmp_path: Path) -> tuple[Run, bytes]:
    """Return a run over a folder of two images, and the list of the images that the driver has written."""
    (tmp_path / "media").mkdir()
    for name in ("0.jpg", "1.jpg"):
        (tmp_path / "media" / name).write_bytes((media / name).read_bytes())
    (tmp_path / "driver").mkdir()
    given = settings(tmp_path / "media")
    gather(given.inputs, tmp_path / "driver", given.template, None)
    return Run.of(given, tmp_path / "driver"), gathered_path(tmp_path / "driver", 0).read_bytes()


def test_a_node_replaces_the_list_of_an_earlier_run(begun, tmp_path):
    run, rows = begun
    node = tmp_path / "node"
    node.mkdir()
    gathered_path(node, 0).write_bytes(b'{"text": "an earlier run"}\n')
    on_ray.put_lists(run, node, {0: [rows[:50], rows[50:]]}, "one")
    assert gathered_path(node, 0).read_bytes() == rows
    run.require_here(node)
    on_ray.put_lists(run, node, {0: (pytest.fail("it is there") for _ in range(1))}, "two")


def test_two_actors_of_a_node_can_write_the_list_at_once(begun, tmp_path):
    run, rows = begun

    def met() -> Iterator[bytes]:
        yield rows[:50]
        on_ray.put_lists(run, tmp_path, {0: [rows]}, "another")
        assert gathered_path(tmp_path, 0).read_bytes() == rows
        yield rows[50:]

    on_ray.put_lists(run, tmp_path, {0: met()}, "one")
    assert gathered_path(tmp_path, 0).read_bytes() == rows
    assert not list(tmp_path.glob("*.partial"))


def _done_by_an_actor(run: Run, folder: Path, chunk: Chunk) -> dict[str, Any]:
    actor = on_ray._Actor(msgspec.json.encode(run), msgspec.json.encode(Address(str(folder))), {}, "call")
    done = actor({"chunk": np.array([msgspec.json.encode(chunk)])})
    return {name: value for name, (value,) in done.items()}


def _text_run(folder: Path) -> tuple[Run, Chunk]:
    given: Settings = settings(written(folder / "rows.jsonl", [{"text": "a"}, {"text": "b"}]))
    return Run.of(given, folder), next(chunks(given.sources(folder), 7, None))


def test_a_node_with_another_input_is_refused(tmp_path):
    run, chunk = _text_run(tmp_path)
    assert not _done_by_an_actor(run, tmp_path / "node", chunk)["failed"]
    written(tmp_path / "rows.jsonl", [{"text": "b"}, {"text": "a"}])
    failed = _done_by_an_actor(run, tmp_path / "other", chunk)["failed"]
    error = msgspec.json.decode(failed, type=Failure).exception()
    assert isinstance(error, InputError)
    assert "has files that differ from the files of the run: input_digests[0] was " in str(error)
    assert complete_shards(tmp_path / "other", chunk, run.digest) is None


@pytest.mark.parametrize("where", ["node", "node/at-0.json"])
def test_a_node_that_cannot_write_reports_a_storage_error(tmp_path, where):
    run, chunk = _text_run(tmp_path)
    if where == "node":
        (tmp_path / where).touch()
    else:
        (tmp_path / where).mkdir(parents=True)
    failed = _done_by_an_actor(run, tmp_path / "node", chunk)["failed"]
    error = msgspec.json.decode(failed, type=Failure).exception()
    assert isinstance(error, StorageError)
    assert f"{tmp_path / where} cannot be " in str(error)


@pytest.mark.parametrize("deaths", [0, 1, 2, 3])
def test_a_row_is_skipped_after_two_deaths_and_ends_the_run_after_another(tmp_path, deaths):
    run, chunk = _text_run(tmp_path)
    (folder := tmp_path / "node").mkdir()
    on_ray._Mark("call", {1: deaths}).write(folder / f"at-{chunk.number}.json")
    done = _done_by_an_actor(run, folder, chunk)
    if deaths == 3:
        error = msgspec.json.decode(done["failed"], type=Failure).exception()
        assert isinstance(error, ProcessDied)
        assert "at row 1 again, although this row was skipped" in str(error)
        return
    (shard,) = complete_shards(folder, chunk, run.digest)
    assert (shard.num_rows, shard.num_errors) == (2, int(deaths == 2))


def test_a_mark_that_cannot_be_written_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="full cannot be written: No space left on device"):
        on_ray._Mark("call", {}).write(Path("/dev/full"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("deaths", "error"), [(1, None), (2, "ProcessDied: the worker exited twice with an unknown status")]
)
def test_a_killed_actor_loses_only_its_row(cluster, media, rows, tmp_path, deaths, error):
    fifo = media / f"ray-{deaths}.jpg"
    rows = [{"id": "deadly", "inputs": [{"image": fifo.name}]}, *rows[:2]]
    path = media / f"ray-{deaths}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    deadly = Deadly(fifo, deaths)
    run(settings(path), tmp_path / "run", ray_address=cluster.address)
    deadly.join()
    fifo.unlink()
    found = [sample.error for sample in Dataset(tmp_path / "run")]
    assert found[0] == error or found[0].startswith(error)
    assert found[1:] == [None, None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_deaths_in_earlier_calls_do_not_fail_a_row(cluster, lines, tmp_path):
    folder, few = tmp_path / "run", settings(lines, limit=3)
    folder.mkdir()
    Run.of(few, folder).begin(folder)
    (folder / "at-0.json").write_text(json.dumps({"call": "earlier", "deaths": {"0": 3, "1": 2}}))
    run(few, folder, ray_address=cluster.address)
    assert [sample.error for sample in Dataset(folder)] == [None] * 3
    assert not (folder / "at-0.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_error_that_ends_the_run_on_a_node_keeps_its_type(cluster, tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["word " * 20] * 50}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"rows\.parquet cannot be read to the end"):
        run(settings(path, shard_rows=50), tmp_path / "run", ray_address=cluster.address)
