"""A lease on a run's folder in an object store. It takes the place of a file lock, which stores do not have.

A lease is a file with a number in the subfolder .lease. The file with the highest number counts. A run creates the next
number, which only one run can do, and only if the earlier lease has expired. It renews its lease while it lives.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Self

import msgspec

from mindie_mm.batch.output.store import Store
from mindie_mm.errors import InputError, MindieMMError, StorageError

LEASE_S = 120.0
"""Time in seconds after which a lease that is not renewed expires. The clocks of machines may differ by less."""
RENEWAL_S = 30.0
_FOLDER = ".lease"
_PATIENCE_S = 5.0


class Holder(msgspec.Struct, frozen=True):
    """Content of a lease: who holds it."""

    token: str
    """Random name of the staging folder. The lock of this folder shows whether its run is alive."""
    host: str
    pid: int
    since: float
    """Time when the run began, in seconds since 1970."""
    expires: float

    @classmethod
    def of_this_process(cls, token: str, since: float) -> Self:
        return cls(token, socket.gethostname(), os.getpid(), since, time.time() + LEASE_S)

    def refusal(self, url: str) -> InputError:
        """Return the error for another run, which may not write to the folder while this holder has the lease."""
        return InputError(
            f"another run is using {url}: process {self.pid} on {self.host}, since {_time(self.since)}. If that "
            f"process was killed, its lease expires at {_time(self.expires)}, in "
            f"{max(1, round(self.expires - time.time()))} s"
        )


class Lease:
    """A lease that a run holds. Its workers may use copies of it."""

    def __init__(self, store: Store, number: int, token: str) -> None:
        self.store = store
        self.number = number
        self.token = token

    @classmethod
    def take(cls, store: Store, token: str) -> Self:
        """Take the lease on a folder. A lease of a dead run with the same token does not count.

        Raises:
            InputError: Another run holds the lease.
            StorageError: The store fails.

        """
        earlier = _numbers(store)
        held = _read(store, max(earlier, default=-1))
        if held and held.token != token and held.expires > time.time():
            raise held.refusal(store.url)
        lease = cls(store, max(earlier, default=-1) + 1, token)
        own = Holder.of_this_process(token, time.time())
        if not store.create(_name(lease.number), msgspec.json.encode(own)):
            holder = _read(store, lease.number)
            if holder != own:  # a repeated request finds the file that the first one created
                raise (holder or own).refusal(store.url)
        if others := set(_numbers(store)) - {*earlier, lease.number}:  # a run that ended meanwhile lets numbers repeat
            store.remove(_name(lease.number))
            raise (_read(store, max(others)) or own).refusal(store.url)
        for number in earlier:
            store.remove(_name(number))
        return lease

    def require(self) -> None:
        """Raise StorageError if this run does not hold the lease any more."""
        now = max(_numbers(self.store), default=-1)
        holder = _read(self.store, now)
        # When the last lease is removed, the numbers begin again, so another run may have the same number.
        if now != self.number or holder is None or holder.token != self.token:
            by = (
                f"process {holder.pid} on {holder.host} has it" if holder else "it was removed, perhaps with its bucket"
            )
            raise StorageError(
                f"this run has lost its lease on {self.store.url}: {by}. If a network failure or a suspended machine "
                "was the reason, wait until no other run uses the folder"
            )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the lease in the background, and remove it at the end."""
        ended = Event()
        thread = Thread(target=self._renew, args=(ended, time.time()), name="mindie_mm-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_PATIENCE_S)
            with suppress(MindieMMError):  # if the store cannot be reached, the lease expires
                self.require()  # another run's lease may have the same number
                self.store.remove(_name(self.number))

    def _renew(self, ended: Event, since: float) -> None:
        while not ended.wait(RENEWAL_S):
            # Each writer checks the lease itself, so a failure needs no report.
            with suppress(MindieMMError):
                self.require()
                self.store.write(_name(self.number), msgspec.json.encode(Holder.of_this_process(self.token, since)))


def holder_of(store: Store) -> Holder | None:
    """Return the last holder of the lease on a folder, whether or not it has expired."""
    return _read(store, max(_numbers(store), default=-1))


def _read(store: Store, number: int) -> Holder | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(store.read(_name(number)), type=Holder)
    return None


def _numbers(store: Store) -> list[int]:
    return [int(name) for name in store.sizes(_FOLDER) if name.isdecimal()]


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:06d}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
