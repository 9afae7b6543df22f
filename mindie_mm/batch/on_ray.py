"""Executes runs on a Ray cluster.

Ray Data distributes the chunks, with backpressure and retries. Each node writes its own shards.

Only chunks, counts and gathered inputs are sent between nodes. Each node reads the input and the checkpoint from the
same paths, and writes to the path of the run's folder. If all nodes share a file system, this folder then contains all
shards. If not, copy the shards to one node, and run the same command there. It then writes only the manifest. If the
folder is in an object store, each node stages its shards in a local folder of its own, and nothing has to be copied. At
the end, these folders are removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import numpy as np

from mindie_mm.batch.batch_messages import Finished
from mindie_mm.batch.deaths import Deaths
from mindie_mm.batch.input.files import replacing
from mindie_mm.batch.input.gather import gathered_path, is_gathered
from mindie_mm.batch.input.source import Chunk, JSONLines
from mindie_mm.batch.output.run_folder import Address, RunFolder, StagedFolder
from mindie_mm.batch.output.shard import ShardInfo, complete_shards
from mindie_mm.batch.settings import Run
from mindie_mm.errors import MindieMMError, StorageError, os_errors_as
from mindie_mm.processes.ipc import Failure
from mindie_mm.processes.ray_cluster import join

if TYPE_CHECKING:
    from mindie_mm.batch.stage import Stage

_MOST_BLOCKS = 10_000
"""Maximum number of Ray Data blocks. The number is limited because Ray's driver keeps data for each block. If there are
more chunks, several chunks share a block."""
_PATIENCE_S = 60.0
_PIECE_BYTES = 1 << 24
"""Number of bytes of a gathered input that are in memory at a time."""


def shards(
    address: str,
    run: Run,
    folder: RunFolder,
    chunks: Sequence[Chunk],
    num_workers: int | None,
    *,
    sandbox: bool = False,
) -> Iterator[tuple[Chunk, list[ShardInfo]]]:
    """Yield each chunk with its shards when the chunk is done. The order is undefined.

    Args:
        address: Address of the cluster to join as host:port, "auto" for the cluster that runs on this machine, or
            "local" to start a cluster.
        run: Run whose shards are written.
        folder: Folder of the run, which is at the same path on each node, or in a store.
        chunks: Chunks to tokenize.
        num_workers: Number of actors. The default is one actor per core of the cluster.
        sandbox: Whether each actor decodes media in a sandboxed process.

    Raises:
        InputError: Ray is not installed, or the cluster at the address cannot be joined.
        MindieMMError: An actor failed with this error.

    """
    if not chunks:
        return
    join(address, "ray")
    import ray

    # The gathered inputs are in Ray's object store, which spills them to disk if necessary.
    lists = {
        index: [ray.put(piece) for piece in _pieces(gathered_path(folder.path, index, given))]
        for index, given in enumerate(run.settings.inputs)
        if is_gathered(given)
    }
    encoded = [{"chunk": msgspec.json.encode(chunk)} for chunk in chunks]
    dataset = ray.data.from_items(encoded, override_num_blocks=min(len(encoded), _MOST_BLOCKS)).map_batches(
        _Actor,
        fn_constructor_args=(
            msgspec.json.encode(run),
            msgspec.json.encode(folder.address),
            lists,
            uuid4().hex,
            sandbox,
        ),
        batch_size=1,
        num_cpus=1,
        concurrency=(1, num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))),
    )
    for row in dataset.iter_rows():
        if row["failed"]:
            raise msgspec.json.decode(row["failed"], type=Failure).exception()
        yield msgspec.json.decode(row["chunk"], type=Chunk), msgspec.json.decode(row["shards"], type=list[ShardInfo])
    if isinstance(folder, StagedFolder):
        _remove_staging(folder)


def _remove_staging(folder: StagedFolder) -> None:
    """Remove the staging folders of all nodes. A node that does not answer keeps its folder."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remove, address = ray.remote(num_cpus=0)(_remove_node_folder), msgspec.json.encode(folder.address)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    tasks = [
        remove.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(address)
        for node in nodes
    ]
    for task in tasks:
        with suppress(ray.exceptions.RayError):
            ray.get(task, timeout=_PATIENCE_S)


def _remove_node_folder(address: bytes) -> None:
    path = RunFolder.at(msgspec.json.decode(address, type=Address)).on_node().path
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # the node of the command has other files there
        path.parent.rmdir()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def put_lists(run: Run, folder: Path, lists: Mapping[int, Iterable[bytes]], writer: str) -> None:
    """Write the gathered inputs to a node's `folder`, unless the folder already contains them.

    The folder may contain files of an earlier run. Actors of the node may call this function at the same time.

    Args:
        run: Run that the inputs belong to.
        folder: Folder of the run on this node.
        lists: Index and pieces of each gathered input.
        writer: Unique name of this writer.

    Raises:
        StorageError: An input cannot be written.

    """
    for index, pieces in lists.items():
        path = gathered_path(folder, index, run.settings.inputs[index])
        if not path.is_file() or JSONLines(path).fingerprint() != run.input_digests[index]:
            with replacing(path, writer) as unfinished, unfinished.open("wb") as file:
                file.writelines(pieces)


class _Actor:
    """An actor on a node of the cluster, which runs a stage."""

    def __init__(
        self, run: bytes, address: bytes, lists: Mapping[int, Sequence[Any]], call: str, sandbox: bool = False
    ) -> None:
        self._sandbox = sandbox
        self._run = msgspec.json.decode(run, type=Run)
        self._lists = lists
        self._address = msgspec.json.decode(address, type=Address)
        self._call = call
        self._stage: Stage | None = None

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, list[bytes]]:
        chunk = msgspec.json.decode(batch["chunk"][0], type=Chunk)
        done: list[ShardInfo] | None = None
        failed = b""
        try:
            folder = self._folder
            done = complete_shards(folder.path, chunk, self._run.digest)
            done = self._do(chunk) if done is None else done
            folder.free_copies()
        except MindieMMError as error:  # Ray would wrap this error in an error of its own
            failed = msgspec.json.encode(Failure.of(error))
        return {"chunk": list(batch["chunk"]), "shards": [msgspec.json.encode(done)], "failed": [failed]}

    @cached_property
    def _folder(self) -> RunFolder:
        """The folder of the run on this node. Raise InputError if the store's package is not installed."""
        folder = RunFolder.at(self._address).on_node()
        folder.free_copies()  # the store may have lost shards since an earlier call
        return folder

    def _begun(self) -> Stage:
        import ray

        from mindie_mm.batch.stage import Stage  # imported late, because the driver does not need torch

        if self._stage is None:
            path = self._folder.path
            with os_errors_as(StorageError, f"{path} cannot be written to"):
                path.mkdir(parents=True, exist_ok=True)
            lists = {index: map(ray.get, pieces) for index, pieces in self._lists.items()}
            put_lists(self._run, path, lists, uuid4().hex)
            states = self._run.require_here(path)
            self._stage = Stage(self._run, path, states, self._folder, sandbox=self._sandbox)
        return self._stage

    def _do(self, chunk: Chunk) -> list[ShardInfo]:
        """Tokenize a chunk. A file records the number of the row that is being processed.

        If an actor dies, Ray repeats the chunk on another actor. The file then shows at which row the first actor died.
        """
        stage = self._begun()
        mark = self._folder.path / f"at-{chunk.number}.json"
        deaths = Deaths(_deaths(mark, self._call))
        deaths.require_skipped()

        def at(row: int) -> None:
            _Mark(self._call, deaths.counts | {row: deaths.counts.get(row, 0) + 1}).write(mark)

        at(chunk.first_row)
        for report in stage.run(chunk, deaths.errors(chunk)):
            if isinstance(report, Finished):
                mark.unlink(missing_ok=True)
                return report.shards
            at(min(report.row + 1, chunk.stop_row - 1))
        raise AssertionError(chunk)


class _Mark(msgspec.Struct, frozen=True):
    """Record of a chunk's current row and of the rows at which actors died."""

    call: str
    """Identifier of the call to `shards` that wrote this record. Records of earlier calls are ignored, because a call
    that was stopped leaves the same record as a call whose actor died."""
    deaths: dict[int, int]
    """Rows that were begun and not finished, with the number of times that this happened."""

    def write(self, file: Path) -> None:
        """Write this record to `file`. Raise StorageError if this fails."""
        with os_errors_as(StorageError, f"{file} cannot be written"):
            file.write_bytes(msgspec.json.encode(self))


def _deaths(file: Path, call: str) -> dict[int, int]:
    """Return `deaths` as recorded in `file`, or {} if another call wrote the file.

    Raises:
        StorageError: The file cannot be read.

    """
    try:
        mark = msgspec.json.decode(file.read_bytes(), type=_Mark)
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from error
    return mark.deaths if mark.call == call else {}
