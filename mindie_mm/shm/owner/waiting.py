"""Queue of threads that wait for room in an arena, in order of arrival."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

_T = TypeVar("_T")

# Poll interval of the first thread in line. Another process frees a block by writing a word. This wakes no thread.
POLL_S = 0.001

# Poll interval of the other threads. The first thread normally wakes them, but an exception can prevent this.
_LOOK_S = 1.0


class WaitingLine:
    """First-in, first-out queue of waiting threads.

    This class replaces threading.Condition. If a signal handler raises, `Condition.wait` can return without the lock.
    """

    def __init__(self, mutex: Lock) -> None:
        """Create an empty queue. `mutex` guards the resource that threads wait for."""
        self._mutex = mutex
        self.tickets: deque[SimpleQueue[None]] = deque()
        """One queue for each waiting thread, in order of arrival. An entry in a queue wakes its thread."""

    def wait(self, take: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """Call `take` until it returns a value, and return the value. Return None after `timeout_s` seconds.

        The calling thread calls `take` only while it is first in line, and holds the mutex during the call.
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
            # Do not move this code to a separate method. A signal handler could raise before its first line.
            if ticket in self.tickets:
                self.tickets.remove(ticket)
            self.wake()

    def wake(self) -> None:
        """Wake all waiting threads, so that they try again."""
        for ticket in tuple(self.tickets):
            ticket.put(None)
