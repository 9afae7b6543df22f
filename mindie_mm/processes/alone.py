"""Coroutines that run with or without an event loop, so that scripts and event loops share their code."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_has_loop = contextvars.ContextVar("has_loop", default=True)


def has_loop() -> bool:
    """Return whether an event loop runs the current coroutine. If not, `run_alone` does."""
    return _has_loop.get()


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for another task, on this thread, and return its result.

    Inside it, `has_loop` returns False, and `gather_in_order` and `off_loop` run one piece of work after another.
    Unlike an event loop, this function may be called inside an event loop, and a signal handler may interrupt it at any
    point by raising an exception.
    """
    context = contextvars.copy_context()
    context.run(_has_loop.set, False)
    try:
        while context.run(work.send, None) is None:  # the coroutine only lets other tasks run, and there are none
            pass
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the coroutine waits, but there is no event loop")


async def gather_in_order(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of the coroutines `works`, in order.

    If several coroutines fail, raise the exception of the coroutine that comes first in `works`, even if another
    coroutine fails earlier. The coroutines after it in `works` are canceled.
    """
    if not has_loop() or len(works) == 1:  # a single coroutine needs no task, which would take time in each request
        return await _one_by_one(works)
    import asyncio  # imported late, because the tools for operators import shm and do not need it

    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return [await task for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _one_by_one(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    left = iter(works)
    try:
        return [await work for work in left]
    finally:
        for work in left:
            work.close()
