"""The tokenizer's side of the nursery, which forks and kills decoders and reports when they exit."""

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
from mindie_mm.processes.forking import start_spare
from mindie_mm.processes.ipc import Channel, Child, open_channel
from mindie_mm.processes.restarts import RESTART_WAIT_S, Starter, logged
from mindie_mm.settings.environment import single_threaded

_log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 30.0
"""Maximum time in seconds to wait for a reply from the nursery. After that, the nursery is killed. It normally answers
within milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class NewDecoder:
    """Decoder process that the nursery has forked."""

    pid: int
    channel: Channel
    scratch: Scratch
    status: asyncio.Future[int | None]
    """Future of the exit status that the nursery reports. The result is None if the status is unknown."""


class NurseryClient:
    """Client of a nursery process. It restarts the nursery if it dies or hangs. The decoders die with the nursery."""

    def __init__(self, setup: DecoderSetup, scratch_bytes: int, on_down: Callable[[str], object]) -> None:
        """Prepare the client. Call `open` to start the nursery.

        Args:
            setup: Settings of the decoders.
            scratch_bytes: Size of a decoder's scratch memory in bytes.
            on_down: Function to call with the reason if the nursery cannot be restarted, or is not restarted within
                `RESTART_WAIT_S`.

        """
        self._setup = msgspec.json.encode(setup).decode()
        self._scratch_bytes = scratch_bytes
        self._on_down = on_down
        self.why_down = ""
        """Reason why no decoder can be forked. Empty while the nursery is running or is expected to run again soon."""
        self._child: Child | None = None
        self._up = asyncio.Event()
        """Event that is set while the nursery can fork decoders."""
        self._forking: deque[asyncio.Future[tuple[int, asyncio.Future[int | None]]]] = deque()
        """Futures of the callers that wait for a `Forked`, in the order of their requests."""
        self._statuses: dict[int, asyncio.Future[int | None]] = {}
        """Futures of exit statuses that the nursery has not reported yet, by pid."""
        self._starter = Starter("the process that starts the decoders")
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the nursery.

        Raises:
            UnsupportedCheckpoint: No family supports the checkpoint.
            ProcessDied: The nursery cannot be started.

        """
        await self._start()
        self._keeper = asyncio.create_task(self._keep())

    async def fork(self) -> NewDecoder:
        """Fork a decoder. If the nursery is not running, wait for it. Raise ProcessDied if the nursery dies."""
        while not self._up.is_set():  # the nursery may die between the event and this task's turn
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
        """Kill a decoder if it is running. If the nursery does not answer in time, the nursery is killed, too."""
        if (status := self._statuses.get(pid)) is not None:
            self._tell(Kill(pid))
            self.expect(status)

    def expect(self, answer: asyncio.Future[Any]) -> None:
        """Kill the nursery unless `answer` is done within `ANSWER_LIMIT_S`."""
        child = self._child
        assert child is not None

        def look() -> None:
            if not answer.done():
                _log.error(
                    "the process that starts the decoders did not answer within %g s and was killed", ANSWER_LIMIT_S
                )
                child.kill()

        asyncio.get_running_loop().call_later(ANSWER_LIMIT_S, look)

    async def close(self) -> None:
        """Stop the nursery and its decoders."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._child is not None:
            await self._child.end()
            self._forget(f"the process that starts the decoders was stopped with status {self._child.status}")

    def _tell(self, message: ToNursery, *descriptors: int) -> None:
        assert self._child is not None
        self._child.channel.send_with(msgspec.msgpack.encode(message), descriptors)

    async def _start(self) -> None:
        environment = single_threaded()
        self._child = await start_spare("mindie_mm.decode.nursery", self._setup, environment=environment)
        try:
            await self._child.ready(Ready, "the process that starts the decoders")
        except BaseException:
            await self._child.end()
            raise
        self._up.set()

    async def _restart(self) -> None:
        try:
            await self._start()
        except Exception as error:
            if isinstance(error, InputError) or not self._starter.patience_s(RESTART_WAIT_S):
                self.why_down = f"no decoder is alive, and the last attempt to start one failed: {error}"
                self._on_down(self.why_down)
            raise
        self.why_down = ""

    async def _keep(self) -> None:
        """Receive the messages of the nursery, and restart it when it dies, until canceled."""
        while True:
            with logged("the connection to the process that starts the decoders failed"):
                await self._receive()
            self._up.clear()
            assert self._child is not None
            await self._child.end()
            self._forget(f"the process that starts the decoders died with status {self._child.status}")
            await self._starter.again(self._restart)

    def _forget(self, why: str) -> None:
        """Complete all futures that wait for messages of a nursery that has died."""
        while self._forking:
            if not (born := self._forking.popleft()).done():
                born.set_exception(ProcessDied(why))
        while self._statuses:  # the kernel kills decoders with their parent
            if not (status := self._statuses.popitem()[1]).done():
                status.set_result(None)

    async def _receive(self) -> None:
        """Complete the futures that wait for messages of the nursery, until it dies."""
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
