"""The tokenizer's side of the nursery: decoder processes are forked, killed, and their ends learnt of."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from mindie_mm.decode.decoder_messages import DecoderSetup, Ended, Fork, FromNursery, Kill, Ready, ToNursery
from mindie_mm.decode.scratch import Scratch, make_file
from mindie_mm.errors import InputError, ProcessDied
from mindie_mm.processes.ipc import Channel, Child, open_channel
from mindie_mm.processes.restarts import RESTART_WAIT_S, Starter, logged
from mindie_mm.settings.environment import single_threaded

_log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 30.0
"""Time in seconds that a nursery has for what takes milliseconds. One that takes longer hangs, and is killed."""


@dataclass(frozen=True, slots=True, eq=False)
class NewDecoder:
    """A decoder process that runs."""

    pid: int
    channel: Channel
    scratch: Scratch
    status: asyncio.Future[int | None]
    """Exit status, once the nursery has told it. None if it is unknown."""


class NurseryClient:
    """A nursery process, which is started again when it dies or hangs. Its decoders die with it."""

    def __init__(self, setup: DecoderSetup, scratch_bytes: int, on_down: Callable[[str], object]) -> None:
        """Prepare a nursery. Use `open` to start it.

        Args:
            setup: Settings of the decoders.
            scratch_bytes: Size of a decoder's scratch memory.
            on_down: Function that is called with the reason when no nursery can be started, or none within
                `RESTART_WAIT_S`.

        """
        self._setup = msgspec.json.encode(setup).decode()
        self._scratch_bytes = scratch_bytes
        self._on_down = on_down
        self.why_down = ""
        """Reason why no decoder can be forked. Empty if one can be, or will be."""
        self._child: Child | None = None
        self._up = asyncio.Event()
        """Set while the nursery can fork."""
        self._forking: deque[asyncio.Future[tuple[int, asyncio.Future[int | None]]]] = deque()
        """Callers that wait for a `Forked`, in order."""
        self._statuses: dict[int, asyncio.Future[int | None]] = {}
        """Exit statuses that the nursery has not told yet, by pid."""
        self._starter = Starter("the decoders' nursery")
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the nursery.

        Raises:
            UnsupportedCheckpoint: No family serves the checkpoint.
            ProcessDied: The nursery cannot be started.

        """
        await self._start()
        self._keeper = asyncio.create_task(self._keep())

    async def fork(self) -> NewDecoder:
        """Fork a decoder. Wait for a nursery if there is none. Raise ProcessDied if the nursery dies meanwhile."""
        while not self._up.is_set():  # it may have died between the event and this task's turn
            await self._up.wait()
        ours, theirs = socket.socketpair()
        file = make_file(self._scratch_bytes)
        born: asyncio.Future[tuple[int, asyncio.Future[int | None]]] = asyncio.get_running_loop().create_future()
        try:
            scratch = Scratch(file)
            self._tell(Fork(), theirs.fileno(), file)
        finally:
            os.close(file)
            theirs.close()
        self._forking.append(born)
        self.expect(born)
        channel = await open_channel(ours)
        try:
            pid, status = await born
        except BaseException:
            await channel.close()
            raise
        return NewDecoder(pid, channel, scratch, status)

    def kill(self, pid: int) -> None:
        """Kill a decoder, if it still runs. If the nursery does not do so in time, both are killed."""
        if (status := self._statuses.get(pid)) is not None:
            self._tell(Kill(pid))
            self.expect(status)

    def expect(self, answer: asyncio.Future[Any]) -> None:
        """Kill the nursery if it has not told `told` within the limit."""
        child = self._child
        assert child is not None

        def look() -> None:
            if not answer.done():
                _log.error("the decoders' nursery has not answered for %g s and is killed", ANSWER_LIMIT_S)
                child.kill()

        asyncio.get_running_loop().call_later(ANSWER_LIMIT_S, look)

    async def close(self) -> None:
        """End the nursery and its decoders."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._child is not None:
            await self._child.end()
            self._forget(f"the decoders' nursery was ended with status {self._child.status}")

    def _tell(self, message: ToNursery, *descriptors: int) -> None:
        assert self._child is not None
        self._child.channel.send_with(msgspec.msgpack.encode(message), descriptors)

    async def _start(self) -> None:
        environment = single_threaded()
        self._child = await Child.start("mindie_mm.decode.nursery", self._setup, environment=environment)
        try:
            await self._child.ready(Ready, "the decoders' nursery")
        except BaseException:
            await self._child.end()
            raise
        self._up.set()

    async def _restart(self) -> None:
        try:
            await self._start()
        except Exception as error:
            if isinstance(error, InputError) or not self._starter.patience_s(RESTART_WAIT_S):
                self.why_down = f"no decoder is alive; the last one did not start: {error}"
                self._on_down(self.why_down)
            raise
        self.why_down = ""

    async def _keep(self) -> None:
        """Serve the nursery and its successors until cancelled."""
        while True:
            with logged("the decoders' nursery cannot be served"):
                await self._receive()
            self._up.clear()
            assert self._child is not None
            await self._child.end()
            self._forget(f"the decoders' nursery died with status {self._child.status}")
            await self._starter.again(self._restart)

    def _forget(self, why: str) -> None:
        """Answer everybody who waits for a nursery that has ended."""
        while self._forking:
            if not (born := self._forking.popleft()).done():
                born.set_exception(ProcessDied(why))
        while self._statuses:  # the kernel kills decoders with their parent
            if not (status := self._statuses.popitem()[1]).done():
                status.set_result(None)

    async def _receive(self) -> None:
        """Pass messages on until the nursery dies."""
        decoder = msgspec.msgpack.Decoder[FromNursery](FromNursery)
        assert self._child is not None
        while True:
            try:
                message = decoder.decode(await self._child.channel.recv())
            except EOFError:
                return
            self._starter.proved()
            if isinstance(message, Ended):
                self._statuses.pop(message.pid).set_result(message.status)
                continue
            status: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            self._statuses[message.pid] = status
            if not (born := self._forking.popleft()).done():
                born.set_result((message.pid, status))
