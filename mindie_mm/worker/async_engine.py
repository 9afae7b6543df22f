"""The client of the engine process. Each request is an async iterator."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.engine.requests.engine_messages import (
    Abort,
    Add,
    Encode,
    Features,
    KeepLoras,
    LoadLora,
    LoraFolder,
    Origin,
    Progress,
    Ready,
    Replica,
    Start,
    Stats,
    Stepped,
    ToEngine,
)
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import EngineReloaded, InputError, ProcessDied
from mindie_mm.processes import faults
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.ipc import Child, Failure
from mindie_mm.processes.restarts import logged
from mindie_mm.processes.supervised import Supervised
from mindie_mm.settings.config import EngineConfig

_PROCESS = "mindie_mm.engine.process.engine_process"
_LAUNCHER = "mindie_mm.engine.process.launcher"


class AsyncEngine(Supervised):
    """An engine process and its client. If the process dies, its requests fail and a new process is started."""

    kills_hung = False  # a launcher of ranks ends its ranks when it is asked to exit

    def __init__(
        self, start: Start, forks: ForkClient | None = None, loading: Callable[[float], object] | None = None
    ) -> None:
        """Create the client without a process. Call the class method `start` instead of this constructor."""
        super().__init__("engine process")
        self.silence_s = start.config.step_timeout_s
        self._start = start
        self._forks = forks
        self._loading = loading
        self._requests: dict[str, asyncio.Queue[Progress]] = {}
        """Queues of unread progress, by the id of each request that the engine has not finished."""
        self._decoder = msgspec.msgpack.Decoder(Stepped)
        self._idle = asyncio.Event()
        """Set if there are no requests."""
        self._idle.set()
        self._successor: asyncio.Future[None] | None = None
        """Future of the next process during `reload`. In this time, the engine does not accept requests."""
        self.doubts_checkpoint = False
        """True if the checkpoint may be the reason why the engine does not start, because the last process refused the
        checkpoint, or was started by a reload."""
        self.info: Ready
        self.stats = Stats()

    @classmethod
    async def start(
        cls,
        model: Path | None,
        config: EngineConfig,
        family: str | None = None,
        end_token_ids: tuple[int, ...] | None = None,
        generation_config: str = "vllm",
        loading: Callable[[float], object] | None = None,
        replica: Replica = Replica(),  # noqa: B008 - frozen
        forks: ForkClient | None = None,
        loras: Sequence[Path] | None = None,
    ) -> Self:
        """Start the process and wait until it accepts requests.

        Args:
            model: Checkpoint directory, or None for the embedded checkpoint.
            config: Settings of the engine.
            family: See `WorkerConfig.family`.
            end_token_ids: Same as the argument of `load_model`.
            generation_config: See `WorkerConfig.generation_config`.
            loading: Function to call with the loaded share of the weights, from 0 to 1, while they are loaded.
            replica: Place of the engine among the engines of the service.
            forks: Fork server for the process, if its devices allow this. None means that the process is spawned.
            loras: Folders of LoRA adapters, or None if the engine serves none.

        Raises:
            UnsupportedCheckpoint, DeviceError, InputError, ProcessDied: The process cannot start.

        """
        path = None if model is None else str(model)
        folders = None if loras is None else tuple(LoraFolder(str(folder)) for folder in loras)
        start = Start(path, config, family, end_token_ids, generation_config, replica, folders)
        engine = cls(start, forks, loading)
        await engine.open()
        return engine

    def place(self, replica: Replica) -> None:
        """Set the place of the engine among the engines of the service, for its next process."""
        self._start = msgspec.structs.replace(self._start, replica=replica)

    @property
    def engines(self) -> list[AsyncEngine]:
        """This engine, in a list like `EngineReplicas.engines`."""
        return [self]

    @property
    def accepts(self) -> bool:
        """True if the engine accepts requests."""
        return super().accepts and self._successor is None

    @property
    def restarting(self) -> bool:
        """True if a new process is being started, and no earlier attempt has failed."""
        return not (self.accepts or self.closed or self._starter.failing.is_set())

    async def generate(
        self,
        request_id: str,
        ids: NDArray[np.int64],
        params: SamplingParams,
        asked_s: float | None = None,
        drawn_ids: Sequence[int] = (),
        origin: Origin | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Start a request and yield its progress. Closing the generator aborts the request.

        If the engine is being restarted, the request waits until the engine is up.

        Args:
            request_id: Unique id of the request.
            ids: Prompt ids with handle words, int64 [T].
            params: Sampling settings.
            asked_s: Time of the request, by time.monotonic. None means the time of this call.
            drawn_ids: Output tokens of an earlier call. The output continues after them.
            origin: Origin of the output of the earlier call.

        Raises:
            InputError: A sampling setting is invalid.
            ProcessDied: The engine died during the request, or the engine is closed.
            EngineReloaded: The engine was replaced during the request.
            NoProcess: No engine accepts requests (`wait_until_up`).
            MindieMMError: The engine refused the request or failed to compute it, for example with StaleReference.

        """
        asked_s = time.monotonic() if asked_s is None else asked_s
        params = params.check(self.info.vocab_size)
        await self.wait_until_up()
        with self._queue(request_id) as queue:
            words = np.ascontiguousarray(ids, np.int64).tobytes()
            self._send(Add(request_id, words, params, asked_s, [*drawn_ids], origin))
            faults.point("added-again" if drawn_ids else "sent")
            while True:
                progress = await queue.get()
                if progress.error is not None:
                    raise progress.error.exception()
                yield progress
                if progress.finish_reason is not None:
                    return

    async def encode(self, request_id: str, ids: NDArray[np.int64]) -> AsyncGenerator[list[Features], None]:
        """Yield the features of a prompt's media, some items at a time.

        Args:
            request_id: Unique id of the request.
            ids: Prompt ids with handle words, int64 [T].

        Raises:
            ProcessDied: The engine died during the request, or the engine is closed.
            NoProcess: No engine accepts requests (`wait_until_up`).
            MindieMMError: The engine cannot read or encode the media, for example with StaleReference.

        """
        await self.wait_until_up()
        with self._queue(request_id) as queue:
            num_encoded, finished = 0, False
            while not finished:
                self._send(Encode(request_id, np.ascontiguousarray(ids, np.int64).tobytes(), num_encoded))
                progress = await queue.get()
                if progress.error is not None:
                    raise progress.error.exception()
                num_encoded += len(progress.features)
                finished = progress.finish_reason is not None
                yield progress.features

    async def load_lora(self, folder: Path, key: str = "") -> str:
        """Load a LoRA adapter, also into later processes. Return its key.

        Args:
            folder: Folder of the adapter.
            key: Key that the adapter must have, or an empty string.

        Raises:
            InputError: The adapter is not served (`read_adapter`).
            ProcessDied: The engine died meanwhile, or is closed. The adapter is not loaded.
            NoProcess: No engine accepts requests (`wait_until_up`).
            OperationalError: The adapter has another key.

        """
        await self.wait_until_up()
        request_id = f"lora-{uuid.uuid4().hex}"
        with self._queue(request_id) as queue:
            self._send(LoadLora(request_id, str(folder), key))
            progress = await queue.get()
        if progress.error is not None:
            raise progress.error.exception()
        self.load_lora_later(folder, progress.lora_key)
        return progress.lora_key

    def load_lora_later(self, folder: Path, key: str) -> None:
        """Load a LoRA adapter into later processes."""
        one = LoraFolder(str(folder), key)
        others = tuple(other for other in self._start.loras or () if other.key != key)
        self._start = msgspec.structs.replace(self._start, loras=(*others, one))

    def keep_loras(self, keys: Collection[str]) -> None:
        """Forget all LoRA adapters except those with `keys`, because no request uses the others."""
        loras = self._start.loras or ()
        left = tuple(one for one in loras if one.key in keys)
        if len(left) < len(loras):
            self._start = msgspec.structs.replace(self._start, loras=left)
            if super().accepts:
                self._send(KeepLoras([*keys]))

    @contextmanager
    def _queue(self, request_id: str) -> Iterator[asyncio.Queue[Progress]]:
        """Register a request and its queue of progress. On exit, abort the request unless the engine has ended it."""
        assert request_id not in self._requests, request_id
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        self._requests[request_id] = queue
        self._idle.clear()
        try:
            yield queue
        finally:
            if self._requests.get(request_id) is queue:
                self._forget(request_id)
                if super().accepts:
                    self._send(Abort(request_id))

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]
        if not self._requests:
            self._idle.set()

    async def reload(self, grace_s: float) -> None:
        """Replace the process with a new process, which reads the checkpoint again.

        Requests wait for the new process. Running requests may finish within `grace_s` seconds, and then fail with
        EngineReloaded. Calls at the same time share a new process that has not started yet.

        Raises:
            ProcessDied: The engine is closed.
            NoProcess: No engine accepts requests (`wait_until_up`).
            MindieMMError: The new process did not start. Further attempts follow.

        """
        while self._successor is not None:  # another call replaces the process
            reads_later = not self._replacing
            await asyncio.shield(self._successor)
            if reads_later:
                return
        await self.wait_until_up()
        self._successor = successor = asyncio.get_running_loop().create_future()
        self._settled.clear()
        self.why_down = "is being reloaded"
        idle = asyncio.create_task(self._idle.wait())
        try:
            await asyncio.wait({idle, successor}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            self._starter.proved()  # so that the new process starts without a pause
            self._replace()
            await asyncio.shield(successor)  # another call may wait for it, too
        except asyncio.CancelledError:
            if self._successor is successor:
                self._replace()  # else the engine would never accept requests again
            raise
        finally:
            idle.cancel()

    async def close(self) -> None:
        await super().close()
        self._end_reload(ProcessDied(f"the {self.noun} is closed"))

    async def _launch(self) -> None:
        await super()._launch()
        self._end_reload()

    async def _spawn(self) -> Child:
        """Start a process, or a launcher of several ranks."""
        config = self._start.config
        if (num_ranks := config.tensor_parallel) > 1:
            first_device = self._start.replica.number * num_ranks
            return await Child.start(_LAUNCHER, str(num_ranks), config.device, str(first_device))
        devices = config.device, config.vision_device, config.projector_device
        if self._forks is not None and await self._forks.allows(*devices):
            return await self._forks.start(_PROCESS)
        return await Child.start(_PROCESS)

    async def _prepare(self, child: Child) -> None:
        self._send(self._start)
        loading, self._loading = self._loading, None  # only the first start reports its progress
        self.info = await child.ready(Ready, f"the {self.noun}", loading)
        # A successor gets a cache of the same size, because other programs may use memory by then.
        self._start = msgspec.structs.replace(
            self._start,
            config=replace(self._start.config, kv_cache_bytes=self.info.kv_cache_bytes),
            replica=msgspec.structs.replace(self._start.replica, others_started=True),
            step_bytes=self.info.step_bytes,
            loras=self._known_loras(),
        )
        if (loras := self._start.loras) is not None:  # adapters may have been loaded and unloaded during the start
            for one in loras:
                if one.key not in self.info.lora_keys.values():
                    self._send(LoadLora("", one.folder, one.key))
            self._send(KeepLoras([one.key for one in loras]))
        self.doubts_checkpoint = False

    def _known_loras(self) -> tuple[LoraFolder, ...] | None:
        """Return the adapters for the next process, with the keys that the first process reported."""
        if self._start.loras is None:
            return None
        keys = self.info.lora_keys
        return tuple(LoraFolder(one.folder, one.key or keys[one.folder]) for one in self._start.loras)

    def _refused(self, error: Exception) -> None:
        self._end_reload(error)
        self.doubts_checkpoint = self.doubts_checkpoint or isinstance(error, InputError)

    def _end_reload(self, error: Exception | None = None) -> None:
        """End `reload`, if it is running, with the error of the new process if there is one."""
        self._replacing = False
        successor, self._successor = self._successor, None
        if successor is None or successor.done():
            return
        if error is None:
            successor.set_result(None)
        else:
            successor.set_exception(error)
            successor.exception()  # nobody may wait for it

    async def _restart(self) -> None:
        if self._replacing:
            self.doubts_checkpoint = True
            with logged("the engine process did not start again"):
                await self._launch()
                return
        await super()._restart()

    def _waiting(self) -> Iterable[str]:
        """Return the requests that wait for the engine."""
        return self._requests

    def _take(self, message: bytes) -> None:
        """Put each request's progress into the request's queue."""
        stepped = self._decoder.decode(message)
        self.stats = stepped.stats
        if stepped.progress:
            self._starter.proved()
        for progress in stepped.progress:
            if (queue := self._requests.get(progress.request_id)) is None:
                continue
            if progress.finish_reason is not None or progress.error is not None:
                self._forget(progress.request_id)
            queue.put_nowait(progress)

    def _fail(self, died: str) -> None:
        self.stats = Stats()
        death = Failure.of((EngineReloaded if self._replacing else ProcessDied)(died))
        for request_id, queue in self._requests.items():
            queue.put_nowait(Progress(request_id=request_id, error=death))
        self._requests.clear()
        self._idle.set()

    def _send(self, message: ToEngine | Start) -> None:
        assert self.child is not None
        self.child.channel.send(msgspec.msgpack.encode(message))
