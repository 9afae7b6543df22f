"""Tests that run the commands of the guide to offline runs that need an object store or a Ray cluster.

The command for hf:// is not run, because the Hub of the tests (`tests/hub_server.py`) has models and no data sets.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import Table, parquet

from tests import warm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/batch.md").read_text(encoding="utf-8")
CHECKPOINT = ROOT / "mindie_mm/assets/tiny"
ROWS = [{"image": "docs/images/red_circle.png", "prompt": "What is in the image?"}] * 18


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with the image and the rows of the guide."""
    (tmp_path / "docs/images").mkdir(parents=True)
    shutil.copy(ROOT / "docs/images/red_circle.png", tmp_path / "docs/images")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def commands(holding: str, **replaced: str) -> list[list[str]]:
    """Return the arguments of the commands in the only block of the guide that contains `holding`."""
    (block,) = [one for one in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if holding in one]
    for name, value in replaced.items():
        block = block.replace(name, value)
    return [shlex.split(line) for line in block.splitlines() if line.startswith("mindie-mm ") and "hf://" not in line]


def run(command: list[str]) -> str:
    ended = warm.run(command, timeout=240, env=dict(os.environ))
    assert ended.returncode == 0, (command, ended.stderr)
    return str(ended.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("s3_server")
def test_the_commands_for_an_object_store_run() -> None:
    (writing,) = commands("--output s3://", CHECKPOINT=str(CHECKPOINT))
    assert run(writing).startswith(f"{len(ROWS)} rows, ")
    inspecting, answering = commands("inspect s3://")
    assert run(inspecting).startswith("row 17, ")
    assert Path("row.png").stat().st_size
    run(answering)
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["text"] for answer in answers] == ["red circle"] * len(ROWS)
    store = fsspec.filesystem("s3")
    for part in range(2):
        parquet.write_table(Table.from_pylist([{"prompt": "Hello!"}]), f"rows-{part}.parquet")
        store.put(f"rows-{part}.parquet", f"bucket/rows-{part}.parquet")
    (reading,) = commands("s3://bucket/rows-*.parquet")
    assert run(reading).startswith("2 rows, ")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # warnings that Ray's own code causes
def test_the_commands_for_a_ray_cluster_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_utils: Any = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        tokenizing, answering = commands("--ray ADDRESS", ADDRESS=cluster.address)
        assert f"{len(ROWS)} rows, " in run(tokenizing)
        run(answering)
    finally:
        cluster.shutdown()
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["text"] for answer in answers] == ["red circle"] * len(ROWS)
