"""One worker of `mindie-mm render --workers`: a whole service on sockets that it shares with the other workers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import msgspec

from mindie_mm.errors import MindieMMError
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.ipc import Channel, ChildChannel, Failure, Lifeline, open_channel
from service.render.plans import Kept, Report
from service.server import Fellows, Place, serve
from service.workers.messages import Ask, Begun, Find, Found, FromWorker, Keep, Reported, Reports, Setup, ToWorker


class FellowsOverChannel(Fellows):
    """What the workers share, which the process that started them holds."""

    def __init__(self, name: str, channel: Channel) -> None:
        self._name = name
        self._channel = channel
        self._numbers = count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._report: Callable[[], Report] | None = None
        """Function that returns the report of this worker."""
        self._announced = asyncio.Event()

    async def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: Found = await self._answered(lambda number: Find(number, [*keys]))
        return found.values

    def keep(self, entries: Sequence[Kept]) -> None:
        self._send(Keep([*entries]))

    async def reports(self, own: Report) -> Mapping[str, Report]:
        others: Reports = await self._answered(Ask)
        return dict(sorted({**others.reports, self._name: own}.items()))

    def watch(self, report: Callable[[], Report]) -> None:
        self._report = report

    def announce(self, line: str) -> None:
        self._channel.send(msgspec.msgpack.encode(Begun(line)))
        self._announced.set()

    async def receive(self) -> None:
        """Handle messages until the channel is closed."""
        decoder = msgspec.msgpack.Decoder[ToWorker](ToWorker)
        while True:
            try:
                message = decoder.decode(await self._channel.recv())
            except EOFError:  # the lifeline ends this process
                return
            if isinstance(message, Ask):
                assert self._report is not None, "only a worker that has begun is asked"
                report = await asyncio.to_thread(self._report)
                self._send(Reported(message.number, report))
            elif (reply := self._replies.pop(message.number, None)) is not None and not reply.done():
                reply.set_result(message)

    async def _answered(self, question: Callable[[int], Find | Ask]) -> Any:
        await self._announced.wait()  # because `Begun` must be the first message
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(question(number))
        try:
            return await reply
        finally:
            self._replies.pop(number, None)

    def _send(self, message: FromWorker) -> None:
        self._channel.send(self._encoder.encode(message))


def main(channel: ChildChannel, lifeline: Lifeline, *descriptors: str) -> None:
    """Serve on the sockets with these descriptors until SIGTERM."""
    setup = Setup.decode(channel.recv())

    @asynccontextmanager
    async def fellows() -> AsyncIterator[Fellows]:
        with socket.socket(fileno=os.dup(channel.fileno())) as own:
            opened = FellowsOverChannel(setup.name, await open_channel(own))
            receiving = asyncio.create_task(opened.receive())
            try:
                yield opened
            finally:
                receiving.cancel()

    place = Place([socket.socket(fileno=int(descriptor)) for descriptor in descriptors], fellows)
    worker = setup.worker
    forks = ForkClient("mindie_mm.worker.preloading", str(worker.model or ""), worker.family or "")
    try:
        serve(worker, setup.service, forks, only_plans=True, place=place)
    except MindieMMError as error:
        channel.send(msgspec.msgpack.encode(Failure.of(error)))
    finally:
        forks.abandon()
