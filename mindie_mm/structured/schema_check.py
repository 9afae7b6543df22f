"""Compiles each structured output in a trial before the output's description is sent to the engine.

The compile time of a description cannot be predicted. A JSON schema of 42 bytes may take half a minute, and llguidance
cannot be interrupted. Each description is therefore compiled and tried on a few tokens in a separate process, which
the kernel kills when it reaches a time limit. This process is a fork of a process that has read the checkpoint's
vocabulary.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from cachetools import LRUCache

from mindie_mm.errors import InputError, MindieMMError, ProcessDied
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.processes.ipc import Child, ChildChannel, Failure, Lifeline
from mindie_mm.processes.supervised import Supervised
from mindie_mm.structured.grammar import KEPT, Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.tokenize.text.detokenizer import load_tokenizer

COMPILE_S = 0.1
"""Maximum CPU time in seconds for compiling and trying a description. A JSON schema with a hundred fields takes 5
ms."""

_REST = 4
"""Pause before the next description, as a multiple of the last compile time. In this time, the engine compiles the
description, too, and does other work."""
_WALL_S = 10.0
"""Maximum wall-clock time of a check in seconds. If a check takes longer without exceeding `COMPILE_S` of CPU time, the
machine is too busy, and the check ends without a result."""


class _Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The first message of a process that has read the vocabulary. If reading fails, the process sends a Failure."""


class SchemaCheck(Supervised):
    """A process that checks one description at a time, and a cache of results. The first check starts the process."""

    silence_s = 60.0

    def __init__(self, model: Path, family: str | None) -> None:
        """Prepare checks for the checkpoint directory `model`. `family` is passed to `family_of`."""
        super().__init__("process that checks structured outputs")
        self._arguments = (str(model), family or "")
        self._turn = asyncio.Lock()
        self._asking: asyncio.Task[str] | None = None
        self._known = LRUCache[StructuredOutputs, str](KEPT)
        """Error of each of the `KEPT` most recently used descriptions, or "" for a valid description.

        The engine keeps the same number of compiled descriptions in the same order. A description that the engine has
        to compile again is therefore also checked again, with a pause after the check.
        """

    async def verify(self, wanted: StructuredOutputs) -> None:
        """Check that a description can be compiled in time.

        Raises:
            InputError: The description is invalid, cannot be enforced, is too large, or would take too long to compile.
            ProcessDied: The process died twice, the process cannot start, or this object is closed.
            NoProcess: The process cannot start again.

        """
        wanted.check()
        message = self._known.get(wanted)
        if message is None:
            async with self._turn:
                message = self._known.get(wanted)  # another caller may have checked the description
                if message is None:
                    if self._asking is not None:
                        await asyncio.wait({self._asking})  # the reply to a canceled caller must be read first
                    self._asking = asyncio.create_task(self._ask(wanted))
                    message = await asyncio.shield(self._asking)
        if message:
            raise InputError(message)

    async def close(self) -> None:
        """End the process. A check that is running fails."""
        self.closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        await super().close()

    async def _ask(self, wanted: StructuredOutputs) -> str:
        """Ask the process for the error of `wanted`. If the process dies, ask its successor."""
        for _ in range(2):
            if self._keeper is None and not self.closed:
                with suppress(MindieMMError):  # an InputError about the checkpoint would blame the caller
                    await self.open()
                self.check()
            await self.wait_until_up()
            assert self.child is not None
            reply: asyncio.Future[str] = self._expect(wanted)
            self.child.channel.send(msgspec.msgpack.encode(wanted))
            with suppress(ProcessDied):
                message = await reply
                self._known[wanted] = message  # the caller of `verify` may have been canceled
                return message
        raise ProcessDied(f"the {self.noun} died twice")

    async def _spawn(self) -> Child:
        return await Child.start(__name__, *self._arguments)

    async def _prepare(self, child: Child) -> None:
        await child.ready(_Ready, "it")

    def _take(self, message: bytes) -> None:
        self._starter.proved()
        self._replies.popitem()[1].set_result(message.decode())


def main(channel: ChildChannel, _: Lifeline, model: str, family: str) -> None:
    """Receive descriptions until the channel closes. Reply to each with its error, or with "" if it is valid."""
    try:
        tokenizer = load_tokenizer(Checkpoint.open(model), family or None)
    except MindieMMError as error:
        channel.send(msgspec.msgpack.encode(Failure.of(error)))
        return
    grammars = Grammars(tokenizer, [0])  # the end-of-sequence token does not matter here
    channel.send(msgspec.msgpack.encode(_Ready()))
    while True:
        try:
            wanted = msgspec.msgpack.decode(channel.recv(), type=StructuredOutputs)
        except EOFError:
            return
        message, took_s = _tried(grammars, wanted)
        channel.send(message.encode())
        if not message:
            time.sleep(_REST * took_s)


def _tried(grammars: Grammars, wanted: StructuredOutputs) -> tuple[str, float]:
    """Compile and try `wanted` in a fork of this process. Return the error or "", and the CPU time in seconds.

    The fork protects this process from crashes of the compiler, such as a stack overflow or a lack of memory.

    Raises:
        TimeoutError: The machine was too busy to check the description.

    """
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:  # the default action of the timers' signals ends the process, even inside llguidance
            signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
            signal.setitimer(signal.ITIMER_REAL, _WALL_S)
            message = ""
            try:
                grammars.rehearse(wanted)
            except InputError as error:
                message = str(error)
            os.write(write, message.encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        message = pipe.read().decode()
    _, status, usage = os.wait4(pid, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if ended_by == signal.SIGALRM:
        raise TimeoutError(f"the machine is too busy to compile {wanted.noun} within {_WALL_S:g} s; try again later")
    if ended_by == signal.SIGPROF:
        message = f"compiling {wanted.noun} takes more processor time than the limit of {COMPILE_S:g} s"
    elif status:
        message = f"compiling {wanted.noun} failed with status {os.waitstatus_to_exitcode(status)}"
    return message, usage.ru_utime + usage.ru_stime
