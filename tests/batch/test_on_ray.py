"""A run on a Ray cluster of two nodes, which one machine plays."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindie_mm.batch import Dataset
from mindie_mm.batch.settings import Run
from mindie_mm.errors import StorageError
from tests.batch.conftest import content, run, settings
from tests.batch.deadly import Deadly

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    made.connect(namespace="mindie_mm")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_two_nodes_write_what_one_machine_writes(cluster, lines, tmp_path):
    run(settings(lines), tmp_path / "here")
    run(settings(lines), tmp_path / "there", ray_address=cluster.address)
    assert content(tmp_path / "there") == content(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("deaths", "error"), [(1, None), (2, "ProcessDied: the worker ended with an unknown status")])
def test_an_actor_that_is_killed_loses_its_row_alone(cluster, media, rows, tmp_path, deaths, error):
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
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_a_row_at_which_earlier_calls_were_stopped_is_not_to_blame(cluster, lines, tmp_path):
    folder, made = tmp_path / "run", settings(lines, limit=3)
    folder.mkdir()
    Run.of(made, folder).begin(folder)
    (folder / "at-0.json").write_text(json.dumps({"call": "earlier", "deaths": {"0": 3, "1": 2}}))
    run(made, folder, ray_address=cluster.address)
    assert [sample.error for sample in Dataset(folder)] == [None] * 3
    assert not (folder / "at-0.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_what_ends_a_run_there_ends_it_with_our_own_error(cluster, tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["word " * 20] * 50}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"rows\.parquet cannot be read any further"):
        run(settings(path, shard_rows=50), tmp_path / "run", ray_address=cluster.address)
