"""Names to addresses, in threads of their own.

The event loop's are few and do other work, and a lookup cannot be ended: names whose nameserver says nothing would hold
up all others, long after their fetches were given up.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from aiohttp.abc import ResolveResult

MAX_LOOKUPS = 64
"""Most lookups at a time, those included that nobody waits for any more."""
MAX_OF_A_REQUEST = 4
"""Most of them that are for one request; further ones wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _Lookup:
    host: str
    port: int
    family: int
    request: str | None
    """The request whose fetch asked for it."""
    found: Future[list[ResolveResult]] = field(default_factory=Future)


class Lookups:
    """Lookups, each in a daemon thread, so that a process ends without them. For any thread and any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Lookup] = []
        self._running: list[_Lookup] = []

    async def resolve(self, host: str, port: int, family: int, request: str | None = None) -> list[ResolveResult]:
        """The addresses of `host`; OSError (gaierror) if it has none, UnicodeError if it is no name.

        `request` names whose lookup it is: of one request only so many run at a time. None: nobody's.
        """
        lookup = _Lookup(host, port, family, request)
        with self._lock:
            self._waiting.append(lookup)
            self._start()
        try:
            return await asyncio.wrap_future(lookup.found)
        finally:
            with self._lock:
                if lookup in self._waiting:
                    self._waiting.remove(lookup)

    def _start(self) -> None:
        """Starts what may run of what waits, the longest waiting first; the lock is held."""
        for lookup in [*self._waiting]:
            if not self._has_room(lookup):
                continue
            self._waiting.remove(lookup)
            if not lookup.found.set_running_or_notify_cancel():
                continue
            try:
                threading.Thread(target=self._run, args=(lookup,), name="lookup", daemon=True).start()
            except RuntimeError as error:  # no further thread is to be had
                lookup.found.set_exception(OSError(str(error)))
            else:
                self._running.append(lookup)

    def _has_room(self, lookup: _Lookup) -> bool:
        own = sum(running.request == lookup.request for running in self._running)
        return len(self._running) < MAX_LOOKUPS and (lookup.request is None or own < MAX_OF_A_REQUEST)

    def _run(self, lookup: _Lookup) -> None:
        try:
            lookup.found.set_result(_resolve(lookup.host, lookup.port, lookup.family))
        except Exception as error:  # noqa: BLE001 - whoever waits has it
            lookup.found.set_exception(error)
        finally:
            with self._lock:
                self._running.remove(lookup)
                self._start()


def _resolve(host: str, port: int, family: int) -> list[ResolveResult]:
    """As aiohttp's own resolver, which asks the event loop."""
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host,
            host=socket.getnameinfo(address, numeric)[0],  # with the zone, where the address has one
            port=port,
            family=found,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for found, _, protocol, _, address in socket.getaddrinfo(
            host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
    ]
