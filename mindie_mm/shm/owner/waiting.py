"""Line of threads that wait for room in an arena, in order of arrival."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

_T = TypeVar("_T")

# Poll interval of the first thread in line. Other processes free a block with a plain store, which wakes no thread.
POLL_S = 0.001

# Poll interval of the other threads. The thread ahead normally wakes them, but an exception can prevent that.
_LOOK_S = 1.0


class WaitingLine:
    """First-in, first-out line of waiting threads.

    It replaces threading.Condition, whose `wait` can return without its lock if a signal handler raises.
    """

    def __init__(self, mutex: Lock) -> None:
        """Create an empty line. `mutex` guards the resource that threads wait for."""
        self._mutex = mutex
        self.tickets: deque[SimpleQueue[None]] = deque()
        """One queue per waiting thread, in the order of service."""

    def wait(self, take: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """Call `take` until it returns a value, and return that value, or None after `timeout_s` seconds.

        `take` is called with the mutex held, and only while this thread is first in line.
        """
        deadline = time.monotonic() + timeout_s
        ticket: SimpleQueue[None] = SimpleQueue()
        try:
            self.tickets.append(ticket)
            while True:
                with self._mutex:
                    is_first = self.tickets[0] is ticket
                    taken = take() if is_first else None
                left_s = deadline - time.monotonic()
                if taken is not None or left_s <= 0:
                    return taken
                with suppress(Empty):
                    ticket.get(timeout=min(left_s, POLL_S if is_first else _LOOK_S))
        finally:
            # Not in a method of its own: a signal handler could raise before the method's first line.
            if ticket in self.tickets:
                self.tickets.remove(ticket)
            self.wake()

    def wake(self) -> None:
        """Let all waiting threads try again."""
        for ticket in tuple(self.tickets):
            ticket.put(None)
