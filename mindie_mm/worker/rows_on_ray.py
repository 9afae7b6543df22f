"""Answers rows with actors on the nodes of a Ray cluster. Each actor has one engine.

Only rows without their arrays, and answers, are sent between nodes. Each node reads the arrays and the checkpoint at
the same paths as the machine that runs the command. Ray restarts a dead actor, on another node if necessary.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mindie_mm.batch import Dataset
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.batch.same_run import differences
from mindie_mm.engine.requests.engine_messages import Ready
from mindie_mm.errors import InputError, MindieMMError, NoProcess, ProcessDied
from mindie_mm.processes.ipc import Failure
from mindie_mm.processes.ray_cluster import KEEP_CHILDREN, accelerators, join
from mindie_mm.processes.tasks import task_group
from mindie_mm.settings.config import EngineConfig, Replicas, WorkerConfig
from mindie_mm.worker.answer_file import Line, Origin, Requests
from mindie_mm.worker.rows import ENGINE_FAILED, RowWorker, row_worker

_log = logging.getLogger(__name__)

_BACK_S = 900.0
"""Time in seconds for the engine of an actor to restart."""
_PATIENCE_S = 60.0
"""Time in seconds until a warning that actors have not started, because Ray waits for resources without a word."""
_CLOSE_S = 10.0
"""Maximum time in seconds for actors to end their engines."""
_MOST_CALLS = 100_000
"""Maximum number of concurrent calls to an actor. It is not reached, because the caller limits the rows in progress."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that an actor needs to answer rows."""

    folder: str
    """Folder of the run, or its URL."""
    config: WorkerConfig
    requests: Requests
    origin: Origin
    """Origin of the answers on the machine that runs the command."""


class _Actor:
    """An actor on a node of the cluster. Its methods return errors of this package, which Ray would wrap."""

    def __init__(self) -> None:
        self._opened = AsyncExitStack()
        self._rows: RowWorker | None = None
        self._starting: asyncio.Task[Any] | None = None

    async def start(self, plan: _Plan) -> Ready | Failure:
        """Start the engine, or wait until it has been restarted. Return information about the engine."""
        self._starting = asyncio.current_task()
        try:
            if self._rows is None:
                dataset = Dataset(plan.folder)
                here = Origin.of(dataset, plan.config, plan.requests.default)
                if differing := differences(plan.origin.parts(), here.parts()):
                    raise InputError(f"files or versions differ: {'; '.join(differing.values())}")
                opening = row_worker(dataset, plan.config, plan.requests, verifies=True)
                self._rows = await self._opened.enter_async_context(opening)
            await self._rows.wait_until_up(_BACK_S)
            return self._rows.info
        except MindieMMError as error:
            failure = Failure.of(error)
            where = (
                f"node {socket.gethostname()} cannot answer the rows in {plan.folder}. Each node needs this folder and "
                "the checkpoint at the same paths as the machine that runs the command, for example on a shared file "
                "system"
            )
            return msgspec.structs.replace(failure, message=f"{where}: {failure.message}")
        finally:
            self._starting = None

    async def answer(self, record: ShardRow) -> Line | Failure:
        """Return the same as `RowWorker.answer`."""
        assert self._rows is not None
        try:
            return await self._rows.answer(record)
        except MindieMMError as error:
            return Failure.of(error)

    async def require_answering(self) -> Failure | None:
        """Return the error that `RowWorker.require_answering` raises."""
        assert self._rows is not None
        try:
            await self._rows.require_answering()
        except MindieMMError as error:
            return Failure.of(error)
        return None

    async def close(self) -> None:
        """End the engine, and remove the arena. A call to `start` in progress is canceled."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        await self._opened.aclose()


class _Member:
    """An actor and its number of rows in progress."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.num_rows = 0

    async def call(self, method: str, *arguments: object, retries: int = 0) -> Any:
        """Call a method of the actor. Raise the error that it returns, or ProcessDied if the actor or its node died.

        Without `retries`, Ray refuses calls while it restarts the actor. With -1, Ray repeats the call until an actor
        answers.
        """
        from ray.exceptions import RayError, RayTaskError

        try:
            returned = await getattr(self.actor, method).options(max_task_retries=retries).remote(*arguments)
        except RayTaskError:
            raise  # an exception of our own code
        except RayError as error:
            reasons = str(error).strip().splitlines()
            why = f": {reasons[-1].strip()}" if method == "start" and reasons else ""
            raise ProcessDied(f"the Ray actor died ({type(error).__name__}){why}") from error
        if isinstance(returned, Failure):
            raise returned.exception()
        return returned


class RayWorkers:
    """Actors with the interface of one `RowWorker`. A row goes to the actor with the fewest rows.

    An actor whose engine failed gets no rows until its engine, or the actor that Ray starts in its place, is up.
    """

    def __init__(self, members: Sequence[_Member], plan: _Plan) -> None:
        """Take the actors, which have not started their engines. Call `ray_workers` instead."""
        self.num_engines = len(members)
        self.info: Ready
        self._members = members
        self._plan = plan
        self._up: list[_Member] = []
        self._starting: set[asyncio.Task[None]] = set()
        """Tasks that start the engines of actors again."""
        self._failure: MindieMMError = NoProcess("no Ray actor has started")
        """Reason why the last actor did not start again."""

    async def start(self) -> None:
        """Start all engines. Raise the error of the first engine that does not start."""
        async with task_group() as group:
            starting = [group.create_task(self._start(member)) for member in self._members]
            _, waiting = await asyncio.wait(starting, timeout=_PATIENCE_S, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                _log.warning(
                    "%d of %d Ray actors have not started yet: Ray waits for free resources, or the model is loading",
                    len(waiting), len(starting),
                )  # fmt: skip

    async def answer(self, record: ShardRow) -> Line:
        """Return the answer to a row, or the row's error. Raise an error of `ENGINE_FAILED` if the engine failed."""
        answer: Line = await self._call("answer", record)
        return answer

    async def require_answering(self) -> None:
        """Raise an error of `ENGINE_FAILED` if even a trivial request makes an engine fail."""
        await self._call("require_answering")

    async def wait_until_up(self, wait_s: float) -> None:
        """Wait until an actor accepts rows.

        Raises:
            NoProcess: No actor does so within `wait_s` seconds.
            MindieMMError: No actor can be started again.

        """
        while not self._up:
            if not self._starting:
                raise self._failure
            done, _ = await asyncio.wait(self._starting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise NoProcess(f"no Ray actor accepts rows, and none was restarted within {wait_s:g} s")

    async def close(self) -> None:
        """End the engines and the actors."""
        import ray

        closing = [asyncio.create_task(member.call("close")) for member in self._members]
        await asyncio.wait(closing, timeout=_CLOSE_S)  # dead actors do not answer
        unfinished = [*closing, *self._starting]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        for member in self._members:
            ray.kill(member.actor)

    async def _call(self, method: str, *arguments: object) -> Any:
        await self.wait_until_up(_BACK_S)
        member = min(self._up, key=lambda one: one.num_rows)
        member.num_rows += 1
        try:
            return await member.call(method, *arguments)
        except ENGINE_FAILED:
            if member in self._up:
                self._up.remove(member)
                task = asyncio.create_task(self._start_again(member))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
            raise
        finally:
            member.num_rows -= 1

    async def _start(self, member: _Member, retries: int = 0) -> None:
        info: Ready = await member.call("start", self._plan, retries=retries)
        if not hasattr(self, "info"):
            self.info = info
        ours, found = ((one.device.partition(":")[0], one.dtype) for one in (self.info, info))
        if found != ours:
            raise InputError(
                f"the engines run on different devices or with different data types: {' and '.join(ours)}, and "
                f"{' and '.join(found)}; choose one device with --device and a data type with --dtype"
            )
        self._up.append(member)

    async def _start_again(self, member: _Member) -> None:
        try:
            await self._start(member, retries=-1)
        except MindieMMError as error:
            _log.warning("a Ray actor gets no more rows: %s", error)
            self._failure = error


@asynccontextmanager
async def ray_workers(
    address: str, dataset: Dataset, config: WorkerConfig, requests: Requests, origin: Origin
) -> AsyncIterator[RayWorkers]:
    """Join the cluster at `address`, start actors, and yield them. At exit, end the actors.

    Args:
        address: Address of the cluster, as in `join`.
        dataset: Rows to answer.
        config: Settings of the workers. `replicas` is the number of actors; "auto" stands for as many as the
            accelerators of the cluster allow, or as many as there are nodes if there are none.
        requests: Sampling settings of the rows, and the form of their answers.
        origin: Origin of the answers on this machine.

    Raises:
        InputError: The cluster cannot be joined or has too few devices, or a node has other files or versions.
        MindieMMError: An engine cannot start.

    """
    if ":" in config.engine.device:
        raise InputError(f"device is {config.engine.device!r}, which is one device; leave out the index with ray")
    join(address, "ray")
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    count, resources = resources_of(nodes, config.replicas, config.engine)
    options = {
        "num_cpus": resources.pop("CPU"),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "max_restarts": -1,
        "max_concurrency": _MOST_CALLS,
        "scheduling_strategy": "SPREAD",
        "runtime_env": {"env_vars": KEEP_CHILDREN},
    }
    make = ray.remote(_Actor).options(**options)
    own = replace(config, replicas=1, model=None if config.model is None else config.model.absolute())
    workers = RayWorkers(
        [_Member(make.remote()) for _ in range(count)], _Plan(str(dataset.folder), own, requests, origin)
    )
    try:
        await workers.start()
        yield workers
    finally:
        await workers.close()


def resources_of(
    nodes: Sequence[Mapping[str, float]], replicas: Replicas, engine: EngineConfig
) -> tuple[int, dict[str, float]]:
    """Return the number of engines, and the Ray resources of each engine.

    An engine gets its accelerators and one CPU. Without accelerators, it gets as many CPUs as possible, because Ray
    limits its threads to this number.

    Args:
        nodes: Resources of each node of the cluster.
        replicas: Number of engines, or "auto".
        engine: Settings of the engines.

    Raises:
        InputError: The cluster has too few accelerators or CPUs.

    """
    total: Counter[str] = Counter()
    for node in nodes:
        total.update(node)
    devices = accelerators(total, engine.device)
    name, each = ("CPU", 1) if devices is None else (devices[0], engine.tensor_parallel)
    room = sum(int(node.get(name, 0)) // each for node in nodes)
    count = replicas
    if count == "auto":
        count = room if devices is not None else sum(node.get("CPU", 0) >= 1 for node in nodes)
    if not 1 <= count <= room:
        need = f"{each} devices ({name}) of one node" if devices is not None else "1 CPU"
        raise InputError(
            f"each engine needs {need}, so the cluster has room for {room} engines, but replicas is {replicas}; lower "
            "replicas, or add nodes"
        )
    if devices is not None:
        return count, {"CPU": 1, name: each}
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    share = next(share for share in range(max(cpus), 0, -1) if sum(num // share for num in cpus) >= count)
    return count, {"CPU": share}
