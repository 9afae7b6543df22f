"""A run on a Ray cluster: Ray Data hands out the chunks, holds back, and tries again; each node writes its own shards.

Nothing but chunks and counts crosses between nodes: a node reads the input and the checkpoint at their paths, and
writes to the run's folder on its own disk. Where all nodes see one disk, that folder holds everything; else the shards
are copied to one of them, and the same command there finds nothing left to do but the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mindie_mm.batch.files import replacing
from mindie_mm.batch.gather import gathered_path, is_gathered
from mindie_mm.batch.messages import Finished, death_error
from mindie_mm.batch.settings import Run
from mindie_mm.batch.shard import ShardInfo, complete_shards
from mindie_mm.batch.source import Chunk
from mindie_mm.errors import InputError

_DEATHS = 2
"""Of actors at one row, after which it is not tried again."""


def shards(
    address: str, run: Run, folder: Path, chunks: Sequence[Chunk], num_workers: int | None
) -> Iterator[tuple[Chunk, list[ShardInfo]]]:
    """The chunks with their shards as they are done, in no order; with `num_workers` actors, None: one a core.

    Joins the cluster at `address`; "local" starts one of this machine. InputError without Ray.
    """
    try:
        import ray
    except ImportError:
        raise InputError("there is no Ray here: pip install 'mindie_mm[ray]'") from None
    if not chunks:
        return
    if not ray.is_initialized():
        ray.init(address=None if address == "local" else address, include_dashboard=False, log_to_driver=False)
    lists = {
        gathered_path(folder, index).name: gathered_path(folder, index).read_bytes()
        for index, given in enumerate(run.settings.inputs)
        if is_gathered(given)
    }
    encoded = [{"chunk": msgspec.json.encode(chunk)} for chunk in chunks]
    dataset = ray.data.from_items(encoded, override_num_blocks=len(encoded)).map_batches(
        _Actor,
        fn_constructor_args=(msgspec.json.encode(run), str(folder), ray.put(lists)),
        batch_size=1,
        num_cpus=1,
        concurrency=(1, num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))),
    )
    for row in dataset.iter_rows():
        yield msgspec.json.decode(row["chunk"], type=Chunk), msgspec.json.decode(row["shards"], type=list[ShardInfo])


class _Actor:
    """A stage on some node."""

    def __init__(self, run: bytes, folder: str, lists: Any) -> None:
        import ray

        from mindie_mm.batch.stage import Stage  # late: it imports torch, and the driver runs none

        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, content in ray.get(lists).items():
            if not (self._folder / name).exists():
                with replacing(self._folder / name) as unfinished:
                    unfinished.write_bytes(content)
        self._run = msgspec.json.decode(run, type=Run)
        self._stage = Stage(self._run, self._folder)

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, list[bytes]]:
        chunk = msgspec.json.decode(batch["chunk"][0], type=Chunk)
        found = complete_shards(self._folder, chunk, self._run.digest)
        done = self._do(chunk) if found is None else found
        return {"chunk": list(batch["chunk"]), "shards": [msgspec.json.encode(done)]}

    def _do(self, chunk: Chunk) -> list[ShardInfo]:
        """Ray does a chunk again elsewhere if an actor dies: where it died stands in a file until it is past."""
        mark = self._folder / f"at-{chunk.number}.json"
        deaths = _deaths(mark)
        doomed = {row: death_error("an unknown status") for row, count in deaths.items() if count >= _DEATHS}

        def at(row: int) -> None:
            mark.write_bytes(msgspec.json.encode(deaths | {row: deaths.get(row, 0) + 1}))

        at(chunk.first_row)
        for report in self._stage.run(chunk, doomed):
            if isinstance(report, Finished):
                mark.unlink()
                return report.shards
            at(report.row + 1)
        raise AssertionError(chunk)


def _deaths(mark: Path) -> dict[int, int]:
    """How often a row was begun and not ended, by row."""
    try:
        return msgspec.json.decode(mark.read_bytes(), type=dict[int, int])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
