"""The supervisor of a process that runs as long as its owner. It replaces the process when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar

from mindie_mm.errors import InputError, NoProcess, ProcessDied
from mindie_mm.processes.ipc import MAX_MESSAGE_BYTES, Child
from mindie_mm.processes.restarts import RESTART_WAIT_S, Restarts, Starter, logged

_log = logging.getLogger(__name__)


class Supervised(ABC):
    """A process and its supervisor. A subclass starts the process, sends requests, and handles its messages.

    When the process dies or hangs, its requests fail, and a successor is started, again and again until it is ready.
    """

    kills_hung: ClassVar[bool] = True
    """True if a process that hangs is killed at once. If not, it is first asked to exit."""
    max_message_bytes: ClassVar[int] = MAX_MESSAGE_BYTES
    """Maximum size of a message from the process. A process that sends a larger message is replaced."""
    silence_s: float
    """A process hangs if it makes no progress for this time although a request waits. It is stopped within twice this
    time."""

    def __init__(self, noun: str) -> None:
        """Create the supervisor without a process. `noun` names the process in messages, such as "engine process"."""
        self.noun = noun
        self.child: Child | None = None
        """The last process that was started."""
        self._up = asyncio.Event()
        """Set while the process is ready."""
        self.closed = False
        self.why_down = "is not started"
        self._starter = Starter(f"the {noun}")
        self._settled = asyncio.Event()
        """Set if the process accepts requests, or if attempts to start it must fail."""
        self._replacing = False
        """True if the process ends because of `_replace`. The caller of `_replace` resets this attribute."""
        self._replies: dict[Hashable, asyncio.Future[Any]] = {}
        """Futures of the replies to requests in progress, by request."""
        self._num_received = 0
        self._receiving: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    @abstractmethod
    async def _spawn(self) -> Child:
        """Start a process."""

    @abstractmethod
    async def _prepare(self, child: Child) -> None:
        """Wait until a new process is ready."""

    @abstractmethod
    def _take(self, message: bytes) -> None:
        """Handle a message. Call `Starter.proved` if it answers a request."""

    def _expect(self, request: Hashable) -> asyncio.Future[Any]:
        """Return a future for the reply to `request`. `_take` removes it and sets its result."""
        reply = self._replies[request] = asyncio.get_running_loop().create_future()
        return reply

    def _fail(self, died: str) -> None:
        """Fail all requests. `died` says which process ended, and how."""
        for reply in self._replies.values():
            if not reply.done():  # false if the caller was canceled
                reply.set_exception(ProcessDied(died))
        self._replies.clear()

    def _waiting(self) -> Iterable[Hashable]:
        """Return the requests that wait for the process."""
        return self._replies

    def _progress(self) -> object:
        """Return a value that changes when the process makes progress."""
        return self._num_received

    def _ping(self) -> None:
        """Ask the process for a message, if it may be silent while it works."""

    def _refused(self, error: Exception) -> None:
        """Handle an error that prevented a process from starting."""

    async def open(self) -> None:
        """Start the process and wait until it is ready. If it does not start, raise its error."""
        await self._launch()
        self._keeper = asyncio.create_task(self._keep())

    @property
    def pid(self) -> int:
        """Process id of the last process that was started."""
        assert self.child is not None
        return self.child.pid

    @property
    def up(self) -> bool:
        """True if the process runs and is ready."""
        return self._up.is_set()

    @property
    def accepts(self) -> bool:
        """True if the process accepts requests."""
        return self.up and not self.closed

    @property
    def num_alive(self) -> int:
        """Number of processes that accept requests, 0 or 1."""
        return int(self.accepts)

    @property
    def restarts(self) -> Restarts:
        """How often the process was restarted, and how often a restart failed."""
        return Restarts.of([self._starter])

    def check(self) -> None:
        """Raise ProcessDied with the reason if the process does not accept requests."""
        if not self.accepts:
            raise ProcessDied(f"the {self.noun} {self.why_down}")

    async def wait_until_up(self, wait_s: float = RESTART_WAIT_S) -> None:
        """Wait until the process accepts requests.

        Raises:
            NoProcess: The process is not up after `wait_s` seconds, or after a shorter time if restarts have failed
                (`Starter.patience_s`).
            ProcessDied: This object is closed.

        """
        try:
            async with asyncio.timeout(self._starter.patience_s(wait_s)):
                while not self._settled.is_set():  # the process may end again before the waiting task runs
                    await self._settled.wait()
        except TimeoutError:
            raise NoProcess(f"the {self.noun} {self.why_down}; it was not restarted within {wait_s:g} s") from None
        if self.closed:
            raise ProcessDied(f"the {self.noun} is closed")
        if not self.up:
            raise NoProcess(f"the {self.noun} {self.why_down}")

    async def settled(self, wait_s: float | None = None) -> bool:
        """Wait until the process accepts requests, or is closed, or a restart has failed. Return whether it accepts.

        If `wait_s` is not None, wait for at most `wait_s` seconds.
        """
        waits = [asyncio.create_task(event.wait()) for event in (self._settled, self._starter.failing)]
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self.accepts

    async def close(self) -> None:
        """End the process. Running requests fail with ProcessDied."""
        self.closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._close_child("is closed")
        self._settled.set()

    async def _launch(self) -> None:
        """Start a process and wait until it is ready. Clean up if it fails."""
        try:
            self.child = await self._spawn()
            await self._prepare(self.child)
        except BaseException as error:
            await self._close_child(f"did not start: {error}")
            if isinstance(error, Exception):
                self._refused(error)
            if isinstance(error, InputError):
                self._settled.set()
            raise
        self._up.set()
        self._settled.set()

    async def _keep(self) -> None:
        """Watch the process, and start a successor when it ends, until this task is canceled."""
        while True:
            hung = ""
            with logged(f"the connection to the {self.noun} {self.pid} failed"):
                hung = await self._serve()
            with logged(f"the {self.noun} {self.pid} cannot be stopped"):
                await self._close_child("died, and another one is being started", hung)
            _log.log(logging.INFO if self._replacing else logging.WARNING, self._death(hung))
            await self._restart()

    async def _restart(self) -> None:
        """Start the next process."""
        await self._starter.again(self._launch)

    async def _serve(self) -> str:
        """Handle messages until the process has ended or hangs, or `_replace` is called.

        Return "" if the process has ended, or else a description for the log.
        """
        self._receiving = asyncio.create_task(self._receive())
        try:
            while not self._receiving.done():
                waiting, progress = {*self._waiting()}, self._progress()
                if waiting:
                    self._ping()
                await asyncio.wait({self._receiving}, timeout=self.silence_s)
                is_silent = progress == self._progress() and not waiting.isdisjoint(self._waiting())
                if is_silent and not self._receiving.done():
                    return f"made no progress for {self.silence_s:g} s and was stopped"
            if self._receiving.cancelled():
                return "is being replaced"
            self._receiving.result()
            return ""
        finally:
            self._receiving.cancel()

    def _replace(self) -> None:
        """End the process, although it works, and start a successor."""
        self._replacing = True
        if self._receiving is not None:
            self._receiving.cancel()

    async def _receive(self) -> None:
        """Handle messages until the process closes the channel."""
        assert self.child is not None
        while True:
            try:
                message = await self.child.channel.recv(self.max_message_bytes)
            except EOFError:
                return
            self._num_received += 1
            self._take(message)

    async def _close_child(self, why_down: str, hung: str = "") -> None:
        """Close and reap the process, and fail its requests. If this call is canceled, it may be repeated."""
        self._up.clear()
        self._settled.clear()
        self.why_down = why_down
        if self.child is None:
            return
        try:
            if hung and self.kills_hung:
                self.child.kill()
            await self.child.close()
        finally:
            self._fail(self._death(hung))

    def _death(self, hung: str) -> str:
        assert self.child is not None
        return f"the {self.noun} {self.child.pid} {hung or f'died with status {self.child.status}'}"
