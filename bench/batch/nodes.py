"""`mindie-mm tokenize --ray` on clusters of one to four nodes on this machine: `python -m bench.batch.nodes`.

Each node has one actor. More nodes than cores show the cost of a node, not a speedup. A run of few rows is subtracted,
so that the start of the actors does not count. The sizes of the cluster take turns.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from bench.batch.contestants import tokenize
from bench.batch.images import CACHE, image_folder, rows
from bench.report import RESULTS, median, write
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

FEW_ROWS, ROWS = 32, 2048
TURNS = 3
MOST_NODES = 4


def seconds_a_row(folder: Path, checkpoint: Path, images: Path, num_nodes: int) -> float:
    """Return the wall seconds per row on a new cluster."""
    from ray.cluster_utils import Cluster

    files = {count: rows(images, folder / f"{count}.jsonl", range(count)) for count in (FEW_ROWS, ROWS)}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        took = {}
        for count, path in files.items():
            options = ("--shard-rows", "16", "--ray", cluster.address)
            took[count] = tokenize(path, checkpoint, folder / "run", num_nodes, *options).wall_s
            shutil.rmtree(folder / "run")
    finally:
        cluster.shutdown()
    return (took[ROWS] - took[FEW_ROWS]) / (ROWS - FEW_ROWS)


def main() -> None:
    parser(__doc__).parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    images = image_folder(ROWS)
    sizes = range(1, MOST_NODES + 1)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "checkpoint")
        turns = [{size: seconds_a_row(folder, checkpoint, images, size) for size in sizes} for _ in range(TURNS)]
    figures = {
        "rows": ROWS,
        "rows_a_second": {size: round(1 / median([turn[size] for turn in turns]), 1) for size in sizes},
        "times_one_node": {size: round(median([turn[1] / turn[size] for turn in turns]), 2) for size in sizes},
    }
    write("batch_nodes", figures)
    lines = ["# Tokenization on a Ray cluster of several nodes on one machine with two cores", ""]
    lines += ["| nodes | rows per second | times one node |", "|---|---|---|"]
    lines += [
        f"| {size} | {figures['rows_a_second'][size]} | {figures['times_one_node'][size]} |"  # type: ignore[index]
        for size in sizes
    ]
    (RESULTS / "batch_nodes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
