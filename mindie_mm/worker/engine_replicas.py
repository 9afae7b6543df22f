"""Several engines of one service, with the public interface of one engine.

A request goes to the engine that holds its media or its prefix (`mindie_mm.routing`). All engines map the same arena,
so every engine can run every request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mindie_mm.engine.requests.engine_messages import Features, Origin, Progress, Ready, Replica
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import MindieMMError, NoProcess, ProcessDied
from mindie_mm.processes.restarts import RESTART_WAIT_S, Restarts
from mindie_mm.processes.tasks import task_group
from mindie_mm.routing import Candidate, HeldContent, order
from mindie_mm.settings.config import EngineConfig, Replicas
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.content import Contents, contents_of

_log = logging.getLogger(__name__)

LEAST_SHARE = 0.25
"""Minimum share of a prompt that an engine must hold to be preferred. Prompts of one chat template share their first
tokens, which must not send all of them to one engine."""
SAVED_WEIGHT = 4
"""Number of queued tokens that a request may wait for to save one token. It is above 1, because content that is
computed again takes time from other requests, and room in a second cache."""
ANSWER_TOKENS = 64
"""Number of queued tokens that stand for a running answer, unless the request allows fewer. The true length of an
answer is unknown."""


class Launch(Protocol):
    """A function that starts one engine."""

    async def __call__(self, *, loading: Callable[[float], object] | None, replica: Replica) -> AsyncEngine: ...


class _Member:
    """One of the engines, with its load and the content that it holds."""

    def __init__(self, engine: AsyncEngine, name: str, *, prefix_caching: bool) -> None:
        self.engine = engine
        self.name = name
        self.queued_tokens = 0
        info = engine.info
        self._pid = engine.pid
        self._media = HeldContent(info.encoder_cache_tokens)
        self._prefix = HeldContent(info.kv_cache_tokens if prefix_caching else 0)

    def num_held(self, contents: Contents) -> int:
        """Return how many tokens of a request the engine need not compute again."""
        if self._pid != self.engine.pid:
            self._pid = self.engine.pid
            self._media.clear()
            self._prefix.clear()
        return self._media.num_tokens(contents.media) + self._prefix.num_tokens(contents.prefix)

    def candidate(self, contents: Contents) -> Candidate:
        """Return the engine's state for a request."""
        held, whole = self.num_held(contents), sum(content.num_tokens for content in contents.media + contents.prefix)
        return Candidate(self.name, self.queued_tokens, held if held >= LEAST_SHARE * whole else 0)

    def add(self, contents: Contents) -> None:
        """Record that the request was sent to the engine."""
        self._media.add(contents.media)
        self._prefix.add(contents.prefix[::-1])  # the end of a prefix is forgotten first


@dataclass(slots=True, eq=False)
class _Load:
    """The queued tokens of one request."""

    member: _Member
    prompt_tokens: int
    answer_tokens: int

    def __post_init__(self) -> None:
        self.member.queued_tokens += self.prompt_tokens + self.answer_tokens

    def answered(self, num_tokens: int) -> None:
        """Record output. The first output shows that the prompt was computed."""
        done = min(num_tokens, self.answer_tokens)
        self.member.queued_tokens -= self.prompt_tokens + done
        self.prompt_tokens, self.answer_tokens = 0, self.answer_tokens - done

    def end(self) -> None:
        """Record that the request has ended."""
        self.member.queued_tokens -= self.prompt_tokens + self.answer_tokens
        self.prompt_tokens = self.answer_tokens = 0


class EngineReplicas:
    """Several engine processes. If one of them dies, only its own requests fail."""

    def __init__(self, engines: Sequence[AsyncEngine], config: EngineConfig, surplus_tokens: int) -> None:
        """Take ownership of `engines`. Call the class method `start` instead.

        Args:
            engines: Engines that accept requests.
            config: Settings of each engine.
            surplus_tokens: See `WorkerConfig.replica_surplus_tokens`.

        """
        self.engines = [*engines]
        self.order: Callable[[Sequence[Candidate], int, bytes], list[int]] = order
        """Rule that chooses an engine."""
        self._members = [
            _Member(engine, str(number), prefix_caching=config.prefix_caching)
            for number, engine in enumerate(self.engines)
        ]
        self._surplus_tokens = surplus_tokens
        self._reloading = asyncio.Lock()
        self._num_reloads_asked = self._num_reloads_done = 0
        self._left_out = ""
        """Engines that the last complete reload did not replace, and why."""

    @classmethod
    async def start(
        cls,
        launch: Launch,
        replicas: Replicas,
        config: EngineConfig,
        surplus_tokens: int,
        loading: Callable[[float], object] | None = None,
    ) -> Self:
        """Start the engines and wait until all accept requests. If one of them fails, end the others.

        Args:
            launch: Function that starts one engine.
            replicas: Number of engines, or "auto", which starts one engine first to count the devices.
            config: Settings of each engine.
            surplus_tokens: See `WorkerConfig.replica_surplus_tokens`.
            loading: Function to call with the loaded share of all weights, from 0 to 1, while they are loaded.

        Raises:
            UnsupportedCheckpoint, DeviceError, InputError, ProcessDied: An engine cannot start.

        """
        engines: dict[int, AsyncEngine] = {}
        loaded: dict[int, float] = {}
        count = 1 if replicas == "auto" else replicas

        async def one(number: int) -> None:
            def report(share: float) -> None:
                loaded[number] = share
                if loading is not None:
                    loading(sum(loaded.values()) / count)

            engines[number] = await launch(loading=report, replica=Replica(number, count))

        try:
            if replicas == "auto":
                await one(0)
                count = max(1, engines[0].info.num_devices // config.tensor_parallel)
                engines[0].place(Replica(0, count))
            async with task_group() as group:
                for number in range(len(engines), count):
                    group.create_task(one(number))
        except BaseException:
            await asyncio.gather(*(engine.close() for engine in engines.values()))
            raise
        return cls([engines[number] for number in range(count)], config, surplus_tokens)

    @property
    def info(self) -> Ready:
        """Information about the engine with the shortest context, so that every engine can run every request."""
        return min((engine.info for engine in self.engines), key=lambda info: info.max_model_len)

    @property
    def num_alive(self) -> int:
        """Number of engine processes that accept requests."""
        return sum(engine.accepts for engine in self.engines)

    @property
    def restarts(self) -> Restarts:
        """How often engines were restarted, and how often a restart failed."""
        several = [engine.restarts for engine in self.engines]
        return Restarts(sum(one.started for one in several), sum(one.failed for one in several))

    def check(self) -> None:
        """Raise ProcessDied with the reason if no engine accepts requests."""
        if not self.num_alive:
            self.engines[0].check()

    async def generate(
        self,
        request_id: str,
        ids: NDArray[np.int64],
        params: SamplingParams,
        asked_s: float | None = None,
        drawn_ids: Sequence[int] = (),
        origin: Origin | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Start a request on one of the engines, and yield its progress. `AsyncEngine.generate` describes the rest."""
        asked_s = time.monotonic() if asked_s is None else asked_s
        params = params.check(self.info.vocab_size)
        answer_tokens = ANSWER_TOKENS if params.max_tokens is None else min(params.max_tokens, ANSWER_TOKENS)
        await self._until_up()
        with self._sent(ids, params.cache_salt, answer_tokens, params.lora) as load:
            generating = load.member.engine.generate(request_id, ids, params, asked_s, drawn_ids, origin)
            async with aclosing(generating) as steps:
                async for step in steps:
                    if step.token_ids:
                        load.answered(len(step.token_ids))
                    yield step

    async def encode(self, request_id: str, ids: NDArray[np.int64]) -> AsyncGenerator[list[Features], None]:
        """Yield the features of a prompt's media from one of the engines. `AsyncEngine.encode` describes the rest."""
        await self._until_up()
        with self._sent(ids, "", 0) as load:
            async with aclosing(load.member.engine.encode(request_id, ids)) as parts:
                async for part in parts:
                    yield part

    async def load_lora(self, folder: Path) -> str:
        """Load a LoRA adapter into all engines, and return its key. If one of them refuses it, others may keep it.

        An engine that is not running loads it at its next start. `AsyncEngine.load_lora` describes the errors.
        """
        first = next((engine for engine in self.engines if engine.accepts), self.engines[0])
        key = await first.load_lora(folder)
        for engine in self.engines:
            with suppress(ProcessDied, NoProcess):
                if engine is not first and engine.accepts:
                    await engine.load_lora(folder, key)
            engine.load_lora_later(folder, key)
        return key

    def keep_loras(self, keys: Collection[str]) -> None:
        """Forget the LoRA adapters that no request uses, which are all except `keys`."""
        for engine in self.engines:
            engine.keep_loras(keys)

    async def reload(self, grace_s: float) -> None:
        """Replace the engine processes one by one. `AsyncEngine.reload` describes the rest.

        An engine is replaced only when all engines accept requests, except engines that cannot be restarted. These are
        left out, unless the checkpoint may be the reason, or a new process does not start. The remaining engines are
        then not replaced. Calls during this call wait, and then replace the engines together, once.

        Raises:
            ProcessDied: Some engines were not replaced. The message names them with their reasons.

        """
        self._num_reloads_asked += 1
        asked = self._num_reloads_asked
        async with self._reloading:
            if self._num_reloads_done < asked:
                done = self._num_reloads_asked  # all calls until now
                self._left_out = await self._replace_all(grace_s)
                self._num_reloads_done = done
            if self._left_out:
                raise ProcessDied(self._left_out)

    async def _replace_all(self, grace_s: float) -> str:
        """Replace the engines. Return the engines that were left out, and why."""
        await self._until_settled()
        reasons: list[str] = []
        # Engines that do not accept requests come last, because they may restart in the meantime.
        for number, engine in sorted(enumerate(self.engines), key=lambda item: not item[1].accepts):
            await self._until_settled()
            try:
                engine.check()
            except ProcessDied as error:
                reasons.append(f"engine {number} was not replaced: {error}")
                continue
            with self._naming(number):
                await engine.reload(grace_s)
            _log.info("engine %d was replaced", number)
        return "; ".join(reasons)

    async def _until_settled(self) -> None:
        """Wait until each engine accepts requests or could not be restarted. Raise if the checkpoint may be faulty."""
        while True:
            for number, engine in enumerate(self.engines):
                if not await engine.settled() and engine.doubts_checkpoint:
                    with self._naming(number):
                        await engine.wait_until_up()
            if not any(engine.restarting for engine in self.engines):  # one may die while another one starts
                return

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Raise ProcessDied with the number of the engine for an error that ends a reload."""
        try:
            yield
        except MindieMMError as error:
            raise ProcessDied(
                f"engine {number} did not start again, and the engines after it were not replaced: {error}"
            ) from error

    async def wait_until_up(self, wait_s: float = RESTART_WAIT_S) -> None:
        """Wait until an engine accepts requests. Raise the errors of `AsyncEngine.wait_until_up`."""
        if self.num_alive:
            return
        waiting = {asyncio.create_task(engine.wait_until_up(wait_s)) for engine in self.engines}
        try:
            failure: NoProcess | ProcessDied | None = None
            for first in asyncio.as_completed(waiting):
                try:
                    await first
                    return
                except (NoProcess, ProcessDied) as error:
                    failure = error
            assert failure is not None
            raise failure
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def close(self) -> None:
        """End the engine processes. Running requests fail with ProcessDied."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _until_up(self) -> None:
        while not self.num_alive:  # an engine may die before the waiting task runs
            await self.wait_until_up()

    @contextmanager
    def _sent(
        self, ids: NDArray[np.int64], cache_salt: str, answer_tokens: int, lora: str | None = None
    ) -> Iterator[_Load]:
        """Choose an engine for a request. The request is part of the engine's load inside the context."""
        contents = contents_of(ids, cache_salt, lora)
        members = [member for member in self._members if member.engine.accepts]
        candidates = [member.candidate(contents) for member in members]
        surplus = min(self._surplus_tokens, SAVED_WEIGHT * max(candidate.held_tokens for candidate in candidates))
        chosen = members[self.order(candidates, surplus, contents.first_key)[0]]
        load = _Load(chosen, max(0, len(ids) - chosen.num_held(contents)), answer_tokens)
        chosen.add(contents)
        try:
            yield load
        finally:
            load.end()
