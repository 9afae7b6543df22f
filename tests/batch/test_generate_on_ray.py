"""Tests for `mindie-mm generate` on a Ray cluster of two nodes, simulated on one machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import mindie_mm
from mindie_mm.batch import Dataset
from mindie_mm.errors import CorruptReference, InputError
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.worker import rows_on_ray
from mindie_mm.worker.answer_file import Origin, Requests
from mindie_mm.worker.rows_on_ray import resources_of
from tests.batch.conftest import CLI, run_in_process, settings, written
from tests.batch.poisoned_actor import POISON, PoisonedActor
from tests.watching import wait_until

ENGINE = "mindie_mm.engine.process.engine_process"
MARK = "MARK_OF_TEST_CLUSTER"
"""Environment variable of all processes of the cluster."""
NUM_ROWS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Yield the address of a cluster of two nodes, each with room for one actor."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    import ray  # imported late, because Ray takes seconds to import

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ[MARK] = str(os.getpid())
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    nodes.connect(namespace="mindie_mm")
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def folder(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with rows in three shards. One row has failed, and some answers are sampled."""
    rows: list[dict[str, Any]] = [
        {"inputs": [{"image": f"{i % 10}.jpg"}, {"text": "What?"}], "ignore_eos": True} for i in range(NUM_ROWS)
    ]
    rows[2]["inputs"][0]["image"] = "gone.jpg"
    for row in (1, 8):
        rows[row] |= {"temperature": 1.5, "seed": row}
    folder = tmp_path_factory.mktemp("on-ray") / "run"
    run_in_process(settings(written(media / "on-ray.jsonl", rows), shard_rows=4), folder)
    return folder


def arguments(folder: Path, output: Path, *options: object) -> list[str]:
    given = [CLI, "generate", "--tokenized", folder, "--output", output, "--max-tokens", 30, *options]
    return [str(argument) for argument in given]


def generate(folder: Path, output: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments(folder, output, *options), capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    """Return the output file of one engine without Ray."""
    output = folder.parent / "whole.jsonl"
    assert generate(folder, output).returncode == 1
    return output.read_bytes()


def engines() -> list[psutil.Process]:
    """Return the engine processes of the cluster."""
    return [one for one in psutil.process_iter() if _is_engine(one)]


def _is_engine(process: psutil.Process) -> bool:
    try:
        return ENGINE in process.cmdline() and process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:
        return False


@pytest.mark.slow
def test_two_nodes_give_the_answers_of_one_engine(cluster: str, folder: Path, whole: bytes, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    first = generate(folder, output, "--ray", cluster, "--limit", 5)
    assert (first.returncode, output.read_bytes()) == (1, b"".join(whole.splitlines(keepends=True)[:5])), first.stderr
    rest = generate(folder, output, "--ray", cluster, "--replicas", 2, "--retry-errors")
    assert (rest.returncode, output.read_bytes()) == (1, whole), rest.stderr
    assert rest.stdout == f"{NUM_ROWS} rows in {output}; 1 row failed\n"
    wait_until(lambda: not engines())


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["command", "engine", "actor"])
def test_a_kill_loses_no_answer(
    cluster: str, folder: Path, whole: bytes, tmp_path: Path, killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDIE_MM_MAX_NUM_SEQS", "1")  # so that the kill comes in the middle
    output = tmp_path / "out.jsonl"
    given = arguments(folder, output, "--ray", cluster)
    running = subprocess.Popen(given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: running.poll() is not None or (output.exists() and output.stat().st_size))
    engine = engines()[0]
    victim = {"command": psutil.Process(running.pid), "engine": engine, "actor": engine.parent()}[killed]
    assert victim is not None
    victim.kill()
    _, errors = running.communicate(timeout=300)
    assert running.returncode == (-signal.SIGKILL if killed == "command" else 1), errors
    if killed == "command":
        assert whole.startswith(output.read_bytes())
        assert output.read_bytes() != whole
        wait_until(lambda: not engines())
        assert generate(folder, output, "--ray", cluster).returncode == 1
    assert output.read_bytes() == whole
    wait_until(lambda: not engines())  # an engine removes the arenas of its actor last


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings that Ray's own code causes
def test_a_row_at_which_every_actor_dies_becomes_an_error(
    cluster: str, folder: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_on_ray, "_Actor", PoisonedActor)
    output = tmp_path / "out.jsonl"
    done = mindie_mm.generate_dataset(folder, output, max_tokens=30, ray=cluster, replicas=2)
    assert done == (NUM_ROWS, 2)
    found, expected = output.read_bytes().splitlines(), whole.splitlines()
    assert json.loads(found.pop(POISON))["error"].startswith("ProcessDied: the Ray actor died")
    del expected[POISON]
    assert found == expected
    wait_until(lambda: not engines())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nodes_without_the_run_are_named(
    cluster: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Dataset(folder)
    dataset.folder = tmp_path / "elsewhere"  # nodes of a test have the same file system
    with pytest.raises(
        InputError, match=r"^node .* cannot answer the rows in .*elsewhere\. Each node needs this folder"
    ):
        mindie_mm.generate_dataset(dataset, tmp_path / "out.jsonl", ray=cluster)


def plan(folder: Path, **changes: Any) -> rows_on_ray._Plan:
    dataset, config, requests = Dataset(folder), WorkerConfig(), Requests(mindie_mm.SamplingParams())
    origin = msgspec.structs.replace(Origin.of(dataset, config, requests.default), **changes)
    return rows_on_ray._Plan(folder, config, requests, origin)


@pytest.mark.parametrize("changes", [{"run": "another"}, {"weights_digest": "another"}, {"versions": {"torch": "1"}}])
def test_a_node_with_other_files_or_versions_is_refused(eight_rows: Path, changes: dict[str, Any]) -> None:
    failure = asyncio.run(rows_on_ray._Actor().start(plan(eight_rows, **changes)))
    assert isinstance(failure, Failure)
    assert f"files or versions differ: {next(iter(changes))} was " in failure.message


def test_a_damaged_copy_of_an_array_on_a_node_is_noticed(eight_rows: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(eight_rows, tmp_path / "run"))
    dataset = Dataset(copy)
    record = dataset.record(0)
    assert record.arrays is not None
    with (copy / "shard-000000000.safetensors").open("r+b") as file:
        file.seek(record.arrays[0][0].offset)
        file.write(b"\x01\x02")
    with pytest.raises(CorruptReference, match=r"has another digest than in its table"):
        dataset.arrays(record, verified=True)
    dataset.arrays(dataset.record(1), verified=True)


NPUS = {"CPU": 8.0, "NPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0}


@pytest.mark.parametrize(
    ("nodes", "replicas", "engine", "wanted"),
    [
        ([NPUS, NPUS], "auto", EngineConfig(tensor_parallel=2), (4, {"CPU": 1, "NPU": 2})),
        ([NPUS, NPUS], 3, EngineConfig(), (3, {"CPU": 1, "NPU": 1})),
        ([NPUS, {"CPU": 2.0}], "auto", EngineConfig(device="cpu"), (2, {"CPU": 4})),
        ([{"CPU": 8.0}, {"CPU": 8.0}], "auto", EngineConfig(), (2, {"CPU": 8})),
        ([{"CPU": 8.0}, {"CPU": 3.0}], 4, EngineConfig(), (4, {"CPU": 2})),
        ([{"CPU": 1.0}, {}], "auto", EngineConfig(), (1, {"CPU": 1})),
    ],
)
def test_engines_share_the_devices_of_a_cluster(
    nodes: list[dict[str, float]], replicas: Any, engine: EngineConfig, wanted: tuple[int, dict[str, float]]
) -> None:
    assert resources_of(nodes, replicas, engine) == wanted


@pytest.mark.parametrize(
    ("nodes", "replicas", "engine", "message"),
    [
        ([NPUS, NPUS], 3, EngineConfig(tensor_parallel=3), r"needs 3 devices \(NPU\) of one node, .* room for 2 eng"),
        ([{"CPU": 2.0}], 3, EngineConfig(), "needs 1 CPU, so the cluster has room for 2 engines, but replicas is 3"),
        ([{}], "auto", EngineConfig(), "room for 0 engines, but replicas is auto"),
    ],
)
def test_more_engines_than_devices_are_refused_with_both_numbers(
    nodes: list[dict[str, float]], replicas: Any, engine: EngineConfig, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        resources_of(nodes, replicas, engine)


def test_one_device_is_not_enough_for_a_cluster(eight_rows: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="device is 'cuda:1', which is one device; leave out the index with ray"):
        mindie_mm.generate_dataset(eight_rows, tmp_path / "out.jsonl", device="cuda:1", ray="local", replicas=1)
