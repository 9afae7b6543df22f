"""The engine as its clients see it: an async iterator for each request, over a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.config import EngineConfig
from mindie_mm.engine.messages import Abort, Add, Failed, FromEngine, Progress, Ready, Start, Stats, Stepped, ToEngine
from mindie_mm.engine.sampling_params import SamplingParams
from mindie_mm.errors import InputError, MindieMMError, ProcessDied, error_named
from mindie_mm.ipc import Channel, exited, open_channel, spawn

STOP_TIMEOUT_S = 10.0
"""How long the process may take to leave by itself; it is killed after that."""


class AsyncEngine:
    """Starts the engine process and speaks with it. Its death fails what runs, and everything after."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process = process
        self._channel = channel
        self._requests: dict[str, asyncio.Queue[Progress | MindieMMError]] = {}
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        self._receiver: asyncio.Task[None] | None = None
        self.info: Ready
        self.stats = Stats()

    @classmethod
    async def start(cls, model: Path | None, config: EngineConfig) -> Self:
        """Starts the process and waits until it takes requests.

        Raises what kept it from starting: UnsupportedCheckpoint, DeviceError, InputError, ProcessDied.
        """
        process, sock = spawn("mindie_mm.engine.process")
        engine = cls(process, await open_channel(sock))
        try:
            engine._send(Start(None if model is None else str(model), config))
            engine.info = await engine._started()
        except BaseException:
            await engine.close()
            raise
        engine._receiver = asyncio.create_task(engine._dispatch())
        return engine

    async def _started(self) -> Ready:
        try:
            reply = self._decoder.decode(await self._channel.recv())
        except EOFError:
            raise await self._death() from None
        if isinstance(reply, Failed):
            raise error_named(*reply.error)
        assert isinstance(reply, Ready), reply
        return reply

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._receiver is not None and not self._receiver.done()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    async def generate(
        self, request_id: str, ids: NDArray[np.int64], params: SamplingParams
    ) -> AsyncGenerator[Progress, None]:
        """Progress of a new request with prompt `ids`, int64 [T] with words; leaving early aborts it.

        Raises what the engine found wrong with it, StaleReference and such, and ProcessDied.
        """
        assert request_id not in self._requests, request_id
        params = _typed(params).check(self.info.vocab_size)
        if not self.alive:
            raise await self._death()
        queue: asyncio.Queue[Progress | MindieMMError] = asyncio.Queue()
        self._requests[request_id] = queue
        finished = False
        try:
            self._send(Add(request_id, np.ascontiguousarray(ids, np.int64).tobytes(), params))
            while not finished:
                progress = await queue.get()
                finished = isinstance(progress, MindieMMError) or progress.error is not None
                if isinstance(progress, MindieMMError):
                    raise progress
                if progress.error is not None:
                    raise error_named(*progress.error)
                finished = progress.finish_reason is not None
                yield progress
        finally:
            del self._requests[request_id]
            if not finished and self.alive:
                self._send(Abort(request_id))

    async def close(self) -> None:
        """Ends the process; requests that run fail with ProcessDied."""
        await self._channel.close()
        if await exited(self._process, STOP_TIMEOUT_S) is None:
            self._process.kill()
            self._process.wait()
        if self._receiver is not None:
            await self._receiver

    async def _dispatch(self) -> None:
        """Hands each request its progress, until the process is gone."""
        try:
            while True:
                stepped = self._decoder.decode(await self._channel.recv())
                assert isinstance(stepped, Stepped), stepped
                self.stats = stepped.stats
                for progress in stepped.progress:
                    if queue := self._requests.get(progress.request_id):
                        queue.put_nowait(progress)
        except EOFError:
            pass
        finally:
            death = await self._death()
            for queue in self._requests.values():
                queue.put_nowait(death)

    def _send(self, message: ToEngine | Start) -> None:
        self._channel.send(msgspec.msgpack.encode(message))

    async def _death(self) -> ProcessDied:
        """The process is gone, or about to be: its end of the channel is closed."""
        status = await exited(self._process, STOP_TIMEOUT_S)
        if status is None:
            return ProcessDied(f"the engine process {self._process.pid} closed its channel and runs on")
        return ProcessDied(f"the engine process {self._process.pid} is gone, exit status {status}")


def _typed(params: SamplingParams) -> SamplingParams:
    """`params` as the engine process will read it; InputError names a setting of another type."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise InputError(f"the sampling parameters are not of their types: {error}") from error
