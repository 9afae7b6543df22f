"""The tokenizer process. It owns the arena, and processes several requests at the same time.

It exits when its client closes the channel or dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import torch

from mindie_mm.device import bind_tokenizer
from mindie_mm.errors import MindieMMError, OperationalError, RequestAborted
from mindie_mm.processes import faults
from mindie_mm.processes.ipc import Channel, ChildChannel, Failure, Lifeline, open_channel
from mindie_mm.settings.environment import fault_folder
from mindie_mm.shm import Arena, collect
from mindie_mm.tokenize.prompts import Prompts
from mindie_mm.tokenize.setup import Setup
from mindie_mm.tokenize.stage.tokenizer_messages import (
    Cancel,
    Cut,
    CutUp,
    Failed,
    FromProcess,
    Planned,
    Pong,
    Tokenize,
    Tokenized,
    ToProcess,
)
from mindie_mm.tokenize.stores import ArenaStore

_log = logging.getLogger(__name__)


class Server:
    """A server that answers the requests of one channel."""

    def __init__(self, channel: Channel, prompts: Prompts, arena: Arena) -> None:
        self._channel = channel
        self._prompts = prompts
        self._arena = arena
        self._requests: dict[int, asyncio.Task[None]] = {}
        """Tasks of requests in progress, by request number."""
        self._ending = False
        self._encoder = msgspec.msgpack.Encoder()

    async def serve(self) -> None:
        """Answer requests until the channel closes or the arena is lost.

        If the arena is lost, the process exits, and the client starts a new process with a new arena.
        """
        try:
            await self._receive()
        finally:
            self._ending = True
            requests = [*self._requests.values()]
            for task in requests:
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder[ToProcess](ToProcess)
        while not self._arena.lost:
            try:
                message = decoder.decode(await self._channel.recv())
            except EOFError:
                return
            if isinstance(message, Tokenize | Cut):
                self._requests[message.number] = asyncio.create_task(self._answer(message))
                await asyncio.sleep(0)  # a task that is canceled before it starts would not reply
            elif isinstance(message, Cancel):
                if (task := self._requests.get(message.number)) is not None:
                    task.cancel()
            else:
                self._send(Pong())

    async def _answer(self, asked: Tokenize | Cut) -> None:
        faults.point("received")
        number = asked.number
        reply: Tokenized | Planned | CutUp | Failed
        try:
            if isinstance(asked, Cut):
                given = asked.speech, Path(asked.folder), asked.max_bytes, asked.domain
                reply = CutUp(number, await self._prompts.stage.cut(*given, always=asked.always))
            elif asked.plans:
                reply = Planned.of(number, await self._prompts.plan(asked.requests, fill=asked.fill))
            else:
                reply = Tokenized.of(number, await self._prompts.make(asked.requests))
        except asyncio.CancelledError:
            if self._ending:  # the client sends the request again, as if this process had died
                raise
            reply = Failed(number, Failure.of(RequestAborted("the request was aborted")))
        except MindieMMError as error:
            if self._arena.lost:
                _log.error("a request failed: %s", error)
                await self._channel.close()
                return
            reply = Failed(number, Failure.of(error))
        except Exception as error:  # noqa: BLE001 - one request fails, not the process
            _log.exception("a request failed with an unexpected error")
            reply = Failed(number, Failure.of(OperationalError(f"the tokenizer failed: {type(error).__name__}")))
        del self._requests[number]
        faults.point("before-reply")
        self._send(reply)
        faults.point("after-reply")

    def _send(self, message: FromProcess) -> None:
        self._channel.send(self._encoder.encode(message))


def main(channel: ChildChannel, lifeline: Lifeline, setup_json: str) -> None:
    """Create the arena, start the decoders, read the checkpoint, send Traits, and answer requests."""
    faults.arm("tokenizer", fault_folder())
    faults.point("starting")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # raises SystemExit, so that the arena is removed
    torch.set_num_threads(1)
    setup = msgspec.json.decode(setup_json, type=Setup)
    if setup.bound_device is not None:
        bind_tokenizer(setup.bound_device)
    try:
        quota_bytes = setup.arena_request_bytes
        arena = lifeline.hold(lambda: Arena.create(setup.arena_bytes, quota_bytes=quota_bytes), Arena.close)
    except MindieMMError as error:
        channel.send(msgspec.msgpack.encode(Failure.of(error)))
        return
    lifeline.before_end(collect)  # if the parent is dead, no other process collects arenas of dead tokenizers
    with arena:
        faults.point("arena-made")
        with suppress(asyncio.CancelledError):  # SIGTERM cancels the task
            asyncio.run(_run(channel, setup, arena))


async def _run(channel: ChildChannel, setup: Setup, arena: Arena) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with AsyncExitStack() as resources:
        try:
            prompts = await Prompts.open(setup, ArenaStore.of(setup, arena), resources)
            channel.send(msgspec.msgpack.encode(prompts.traits))
            with socket.socket(fileno=os.dup(channel.fileno())) as sock:
                await Server(await open_channel(sock), prompts, arena).serve()
        except MindieMMError as error:
            channel.send(msgspec.msgpack.encode(Failure.of(error)))
