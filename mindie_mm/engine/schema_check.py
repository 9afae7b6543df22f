"""Whether a JSON schema can be served, which nobody can tell without compiling it.

How long that takes is not to be seen from a schema: 42 bytes may take half a minute, and nothing stops llguidance. So
each is compiled as the engine will, with the checkpoint's own tokens, in a process that the kernel ends when its time
is up. A process that has read the vocabulary is kept for that, and makes a copy of itself for each schema.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec

from mindie_mm.engine.detokenizer import load_tokenizer
from mindie_mm.engine.grammar import KEPT, Grammars
from mindie_mm.errors import InputError, MindieMMError, ProcessDied
from mindie_mm.ipc import Child, ChildChannel, Failure, Lifeline
from mindie_mm.nn.checkpoint import Checkpoint

MAX_SCHEMA_BYTES = 32768
COMPILE_S = 0.1
"""Processor time that compiling a schema may take; one of a hundred fields takes 5 ms."""

_REST = 4
"""How many times as long as a schema took it is until the next: the engine, which compiles it too, has other work."""
_WALL_S = 10.0
"""Time by the clock after which a schema that took less processor time is given up: nothing is known of it."""
_REPLY_S = 60.0
_WHAT = "the process that checks JSON schemas"


class _Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process's first message: the vocabulary is read. A Failure in its place says what kept it from that."""


class SchemaCheck:
    """Checks schemas one by one, in a process that is started for the first one, and remembers what came of them."""

    def __init__(self, model: Path, family: str | None) -> None:
        """For answers of the checkpoint directory `model`; `family` as in `family_of`."""
        self._arguments = (str(model), family or "")
        self._child: Child | None = None
        self._closed = False
        self._turn = asyncio.Lock()
        self._asking: asyncio.Task[str] | None = None
        self._known: dict[str, str] = {}
        """What is wrong with the last `KEPT` schemas, empty where nothing is; the latest at the end.

        As many as the engine keeps compiled, in the order in which it takes them: what it has to compile again is
        tried again, with its rest.
        """

    async def check(self, schema: str) -> None:
        """InputError for what is no schema, cannot be enforced, is too large, or takes too long. ProcessDied."""
        if (num_bytes := len(schema.encode())) > MAX_SCHEMA_BYTES:
            raise InputError(f"the JSON schema has {num_bytes} bytes, the limit is {MAX_SCHEMA_BYTES}")
        said = self._known.get(schema)
        if said is None:
            async with self._turn:
                said = self._known.get(schema)  # others may have asked the same
                if said is None:
                    if self._asking is not None:
                        await asyncio.wait({self._asking})  # whose caller was cancelled: its answer is read, at least
                    self._asking = asyncio.create_task(self._ask(schema))
                    said = await asyncio.shield(self._asking)
        self._remember(schema, said)
        if said:
            raise InputError(said, param="response_format")

    async def close(self) -> None:
        """Ends the process; what is asked fails."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        if self._child is not None:
            await self._child.end()

    def _remember(self, schema: str, said: str) -> None:
        self._known.pop(schema, None)
        self._known[schema] = said
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]

    async def _ask(self, schema: str) -> str:
        """Return what is wrong with `schema`, from the process, or from another one if that dies. ProcessDied."""
        for _ in range(2):
            if self._closed:
                break
            try:
                async with asyncio.timeout(_REPLY_S):
                    self._child = self._child or await self._started()
                    self._child.channel.send(schema.encode())
                    said = (await self._child.channel.recv()).decode()
            except (EOFError, TimeoutError):
                child, self._child = self._child, None
                if child is not None:
                    await child.end()
                continue
            self._remember(schema, said)  # here, too: its caller may have been cancelled
            return said
        raise ProcessDied(f"{_WHAT} {'is closed' if self._closed else 'died twice'}")

    async def _started(self) -> Child:
        """Start the process. EOFError where it died before it was ready, ProcessDied where it says what kept it."""
        child = await Child.start(__name__, *self._arguments)
        try:
            reply = msgspec.msgpack.decode(await child.channel.recv(), type=_Ready | Failure)
        except BaseException:
            await child.end()
            raise
        if isinstance(reply, Failure):
            await child.end()
            raise ProcessDied(f"{_WHAT} did not start: {reply.message}")
        return child


def main(channel: ChildChannel, _: Lifeline, model: str, family: str) -> None:
    """Answer each schema with what is wrong with it, until the channel closes."""
    try:
        tokenizer = load_tokenizer(Checkpoint.open(model), family or None)
    except MindieMMError as error:
        channel.send(msgspec.msgpack.encode(Failure.of(error)))
        return
    grammars = Grammars(tokenizer, [0])  # where texts end is all the same
    channel.send(msgspec.msgpack.encode(_Ready()))
    while True:
        try:
            schema = channel.recv().decode()
        except EOFError:
            return
        said, took_s = _tried(grammars, schema)
        channel.send(said.encode())
        if not said:
            time.sleep(_REST * took_s)


def _tried(grammars: Grammars, schema: str) -> tuple[str, float]:
    """Return what is wrong with `schema`, and the processor time, in seconds, that a copy of this process took.

    Such a copy also bears what ends a process that compiles: a stack that overflows, memory that is short.

    Raises:
        TimeoutError: The machine was too busy, which is no fault of the schema.

    """
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:  # what these signals do unless one says otherwise: the process ends, whatever it is doing
            signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
            signal.setitimer(signal.ITIMER_REAL, _WALL_S)
            said = ""
            try:
                grammars.constraint(schema)
            except InputError as error:
                said = str(error)
            os.write(write, said.encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status, usage = os.wait4(pid, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if ended_by == signal.SIGALRM:
        raise TimeoutError(f"the machine gave no processor time to compile a JSON schema within {_WALL_S:g} s")
    if ended_by == signal.SIGPROF:
        said = f"compiling the JSON schema takes more than {COMPILE_S:g} s of processor time, the limit"
    elif status:
        said = f"compiling the JSON schema fails, with status {os.waitstatus_to_exitcode(status)}"
    return said, usage.ru_utime + usage.ru_stime
