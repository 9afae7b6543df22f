"""N tokenizer processes behind one awaitable call."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from mindie_mm.errors import ProcessDied
from mindie_mm.ipc import Channel, exited, open_channel, spawn
from mindie_mm.shm import Ref, collect, free
from mindie_mm.tokenize.messages import Failed, Ready, Reply, Request, Tokenized, TokenizeRequest
from mindie_mm.tokenize.prompt import Prompt

_log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0

_PATIENCE_S = 2.0
"""How long a process may take to end by itself, and then on SIGTERM, before it is killed."""


@dataclass(slots=True, eq=False)
class _Process:
    """One tokenizer process, from its readiness to its death."""

    popen: subprocess.Popen[bytes]
    channel: Channel
    pending: dict[int, asyncio.Future[Prompt]] = field(default_factory=dict)
    """Requests that it has not answered, by id."""

    def fail_pending(self) -> None:
        """Fails them."""
        why = f"tokenizer process {self.popen.pid} died with status {self.popen.returncode}"
        for future in self.pending.values():
            if not future.done():
                future.set_exception(ProcessDied(why))
        self.pending.clear()


class TokenizerPool:
    """Tokenizer processes, each with an arena of its own; a dead one fails its requests and is started again."""

    def __init__(self, model_path: Path, arena_bytes: int) -> None:
        self._model_path = model_path
        self._arena_bytes = arena_bytes
        self._processes: list[_Process] = []
        """Those that take requests."""
        self._dying: list[_Process] = []
        """Those that take none yet, or no more, and are not reaped."""
        self._keepers: list[asyncio.Task[None]] = []
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._encoder = msgspec.msgpack.Encoder()
        self._next_id = 0
        self._some_alive = asyncio.Event()
        self._closed = False

    @classmethod
    async def start(cls, model_path: Path, num_processes: int, arena_bytes: int) -> Self:
        """Starts `num_processes` processes that read `model_path`, each reserving `arena_bytes` of shared memory.

        Raises what the first failing process raised: UnsupportedCheckpoint, SharedMemoryError, ProcessDied.
        """
        pool = cls(model_path, arena_bytes)
        starts = [asyncio.create_task(pool._start_process()) for _ in range(num_processes)]
        try:
            for start in starts:
                await start
        except BaseException:
            await asyncio.gather(*starts, return_exceptions=True)
            await pool.close()
            raise
        pool._keepers += [asyncio.create_task(pool._keep(process)) for process in pool._processes]
        return pool

    @property
    def pids(self) -> list[int]:
        """Process ids of the live processes."""
        return [process.popen.pid for process in self._processes]

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """The prompt of `request`, from the least busy process; waits while none is alive.

        Raises what the tokenizer raised (InputError and below, ArenaFull), and ProcessDied. On cancellation the
        blocks of the abandoned prompt are freed when it arrives.
        """
        while not self._processes and not self._closed:
            await self._some_alive.wait()
        if self._closed:
            raise ProcessDied("the tokenizer pool is closed")
        process = min(self._processes, key=lambda process: len(process.pending))
        self._next_id += 1
        future: asyncio.Future[Prompt] = asyncio.get_running_loop().create_future()
        message = self._encoder.encode(Request(self._next_id, request))
        process.pending[self._next_id] = future
        process.channel.send(message)
        return await future

    async def close(self) -> None:
        """Stops every process; what is pending fails with ProcessDied."""
        self._closed = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        await asyncio.gather(*map(self._bury, [*self._processes, *self._dying]))
        self._some_alive.set()  # those who wait learn that the pool is closed

    async def _start_process(self) -> _Process:
        process = await _spawn(self._model_path, self._arena_bytes)
        self._dying.append(process)  # until it is ready: whoever is cancelled here leaves it to `close`
        try:
            await self._await_ready(process)
        except Exception:
            await self._bury(process)
            raise
        self._dying.remove(process)
        self._processes.append(process)
        self._some_alive.set()
        return process

    async def _await_ready(self, process: _Process) -> None:
        try:
            reply = self._decoder.decode(await process.channel.recv())
        except EOFError:
            status = await exited(process.popen, _PATIENCE_S)
            raise ProcessDied(f"a tokenizer process exited with {status} before it was ready") from None
        if isinstance(reply, Failed):
            raise reply.exception()
        assert isinstance(reply, Ready), reply

    async def _keep(self, process: _Process) -> None:
        """Serves `process`, and its successors, until cancelled."""
        while True:
            with _logged(f"tokenizer process {process.popen.pid} cannot be served"):
                await self._receive(process)
            with _logged(f"tokenizer process {process.popen.pid} cannot be ended"):
                await self._bury(process)
            _log.warning("tokenizer process %d died; starting another", process.popen.pid)
            process = await self._restart()

    async def _bury(self, process: _Process) -> None:
        """Ends and reaps a process, and fails what it has not answered. Once more, if it was cancelled in between."""
        if process in self._processes:
            self._processes.remove(process)
            self._dying.append(process)
            if not self._processes:
                self._some_alive.clear()
        try:
            await _stop(process)
            self._dying.remove(process)
        finally:
            process.fail_pending()
        with _logged("the arena of a tokenizer process cannot be collected"):
            collect()  # it is still there if the process was killed

    async def _restart(self) -> _Process:
        delay_s = _FIRST_RETRY_S
        while True:
            with _logged(f"a tokenizer process did not start, next try in {delay_s:.1f} s"):
                collect()  # what could not be collected before, for want of what a start needs too
                return await self._start_process()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_RETRY_S)

    async def _receive(self, process: _Process) -> None:
        """Hands replies to their callers until the process dies."""
        while True:
            try:
                reply = self._decoder.decode(await process.channel.recv())
            except EOFError:
                return
            assert not isinstance(reply, Ready), reply
            _hand_over(reply, process.pending[reply.id])
            del process.pending[reply.id]


async def _spawn(model_path: Path, arena_bytes: int) -> _Process:
    popen, sock = spawn("mindie_mm.tokenize.process", str(model_path), str(arena_bytes))
    try:
        return _Process(popen, await open_channel(sock))
    except BaseException:
        sock.close()
        popen.kill()
        popen.wait()
        raise


def _hand_over(reply: Tokenized | Failed, future: asyncio.Future[Prompt]) -> None:
    if isinstance(reply, Failed):
        if not future.cancelled():
            future.set_exception(reply.exception())
    elif future.cancelled():
        _free_words(reply.prompt())
    else:
        future.set_result(reply.prompt())


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """One failure, whatever it is, does not end the keeping of a process."""
    try:
        yield
    except Exception:  # noqa: BLE001 - a pool that lost its keeper would wait for ever
        _log.exception(what)


def _free_words(prompt: Prompt) -> None:
    for span in prompt.spans:
        words = prompt.ids[span.start : min(span.stop, span.start + 2)].tolist()
        free(Ref.from_words(words[0], words[1] if len(words) > 1 else None))


async def _stop(process: _Process) -> None:
    """Closes the channel, which ends the process, and reaps it; a process that does not end is killed."""
    await process.channel.close()
    for insist in (process.popen.terminate, process.popen.kill):
        if await exited(process.popen, _PATIENCE_S) is not None:
            return
        insist()
    await exited(process.popen, _PATIENCE_S)
