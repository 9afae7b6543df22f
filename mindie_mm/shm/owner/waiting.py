"""Who waits for room in an arena: threads of its process, served in the order in which they came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

_T = TypeVar("_T")

# Other processes free by a plain store, which wakes nobody.
POLL_S = 0.001

# Poll interval of those that are not first in line. The one ahead wakes them; this is for when an exception there kept
# it from doing so.
_LOOK_S = 1.0


class WaitingLine:
    """Not a Condition: its `wait` may leave its lock to others when a signal handler raises in it."""

    def __init__(self, mutex: Lock) -> None:
        """`mutex` guards what is waited for."""
        self._mutex = mutex
        self.tickets: deque[SimpleQueue[None]] = deque()
        """One of each thread that waits, the first to be served first."""

    def wait(self, take: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """What `take` gives, called under the mutex while it is this thread's turn; None after the deadline."""
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
            # Here and not in a method: a signal handler may raise before a method's first line.
            if ticket in self.tickets:
                self.tickets.remove(ticket)
            self.wake()

    def wake(self) -> None:
        """All look again."""
        for ticket in tuple(self.tickets):
            ticket.put(None)
