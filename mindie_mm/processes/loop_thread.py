"""An event loop on its own thread, with a synchronous interface."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from typing import Any, TypeVar, cast

from mindie_mm.errors import InputError, OperationalError

T = TypeVar("T")

_THREADS = "mindie_mm"
"""Prefix of the names of this package's threads."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result, also if the caller is inside an event loop, for example in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    loop = LoopThread("batch")
    try:
        return loop.run(work)
    finally:
        loop.close()


class LoopThread:
    """An event loop on its own thread, for callers that have no event loop or are inside another one."""

    def __init__(self, owner: str) -> None:
        """Start the thread. `owner` is the name of the object that uses the thread, for error messages.

        Raises:
            OperationalError: No thread can be started, for example because the interpreter is shutting down.

        """
        self._owner = owner
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may need the lock on a thread that already holds it
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=_THREADS, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise OperationalError(f"the {self._owner} cannot start a thread: {error}") from error

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result.

        If an exception such as KeyboardInterrupt interrupts the wait, cancel the work, wait until it has cleaned up,
        and raise the exception again.

        Raises:
            InputError: The loop is closed, or is closed before the work ends, or this process was forked and does not
                have the thread.

        """
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: ended.set())

        if self._forked:
            work.close()
            raise self._forked_error()
        if not self._call(begin):
            work.close()
            raise self._closed_error()
        try:
            ended.wait()
        except BaseException:
            self._call(lambda: tasks[0].cancel())  # noqa: PLW0108 - the task may not exist yet on this thread
            ended.wait()
            raise
        if tasks[0].cancelled():
            raise self._closed_error()
        return tasks[0].result()

    def submit(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start the coroutine that `make` returns, and return a future of its result.

        Canceling the future cancels the coroutine.

        Raises:
            InputError: The loop is closed, or this process was forked and does not have the thread.

        """
        if self._forked:
            raise self._forked_error()
        with self._lock:
            if self._closed:
                raise self._closed_error()
            return asyncio.run_coroutine_threadsafe(self._tracked(make), self._loop)

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the items of an asynchronous generator. Closing the iterator closes the generator.

        The iterator may be closed on any thread, even by the garbage collector on the loop's thread, so `close` does
        not wait until the generator has cleaned up.

        Raises:
            InputError: The loop is closed, or is closed before the last item, or this process was forked and does not
                have the thread.

        """
        ready: queue.SimpleQueue[T | Future[None]] = queue.SimpleQueue()

        async def collect() -> None:
            async with aclosing(items):
                async for item in items:
                    ready.put(item)

        collecting = self.submit(collect)
        collecting.add_done_callback(ready.put)
        try:
            while (item := ready.get()) is not collecting:
                yield cast("T", item)
            collecting.result()
        except CancelledError:
            raise self._closed_error() from None
        finally:
            collecting.cancel()

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel running work, run `last`, and stop the thread, even if this call is interrupted.

        In a forked process, this method does nothing. The garbage collector may call it on any thread. On one of this
        package's threads, the method does not wait until the loop's thread stops, because the thread might wait for
        itself.
        """
        if self._forked:
            return
        with self._lock:  # work that was submitted earlier is scheduled before `_end`
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if not threading.current_thread().name.startswith(_THREADS):
            self._thread.join()
            ending.result()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _call(self, function: Callable[[], object]) -> bool:
        """Schedule a call on the loop's thread. Return False if the loop is closed."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(function)
            return not self._closed

    async def _tracked(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await make()

    async def _end(self, last: Callable[[], Awaitable[None]] | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if last is not None:
            await last()

    def _forked_error(self) -> InputError:
        return InputError(
            f"the {self._owner} belongs to process {self._pid}, from which this process was forked; "
            f"create a new {self._owner} in this process"
        )

    def _closed_error(self) -> InputError:
        """Return the error for calls after `close`. If the interpreter is shutting down, the message says so."""
        ends = "" if threading.main_thread().is_alive() else ": the interpreter is shutting down"
        return InputError(f"the {self._owner} is closed{ends}")
