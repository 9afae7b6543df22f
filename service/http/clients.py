"""Clients of the service: API keys, and the names and quotas that the file of --api-key-file gives them."""

from __future__ import annotations

import logging
import math
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

import msgspec

from mindie_mm.errors import InputError, QuotaExceeded
from mindie_mm.settings.config import ServiceConfig, is_key
from mindie_mm.settings.limits import Count
from service.http.watched_files import WatchedFiles

_log = logging.getLogger(__name__)

_MINUTE_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file."""

    key: str
    max_concurrent_requests: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None


class _PerMinute:
    """A token bucket with room for `limit` units, which fills at `limit` units per minute.

    What is spent may exceed what is left, because the length of an answer is unknown when its request begins. The next
    request then waits until the bucket has filled again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left = float(limit)
        self._filled_s = time.monotonic()

    def spend(self, units: int) -> None:
        self._fill()
        self._left -= units

    def wait_s(self) -> float:
        """Return the time in seconds until a unit is left."""
        self._fill()
        return max(0.0, 1 - self._left) * _MINUTE_S / self.limit

    def _fill(self) -> None:
        now = time.monotonic()
        self._left = min(float(self.limit), self._left + (now - self._filled_s) * self.limit / _MINUTE_S)
        self._filled_s = now


class Client:
    """One API key. A key of --api-key has an empty name and no quota."""

    def __init__(self, name: str, entry: _Entry) -> None:
        self.name = name
        """Name for the log and the metrics. It says nothing about the key."""
        self.num_requests = 0
        """Number of requests to the model."""
        self.num_refused = 0
        """Number of requests refused because of the quota."""
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_running = 0
        """Number of requests in progress."""
        self.set(entry)

    def set(self, entry: _Entry) -> None:
        """Replace the key and the quota, and begin the current minute anew."""
        self.entry = entry
        self.digest = sha256(entry.key.encode()).digest()
        self._requests = None if entry.requests_per_minute is None else _PerMinute(entry.requests_per_minute)
        self._tokens = None if entry.tokens_per_minute is None else _PerMinute(entry.tokens_per_minute)

    def require_room(self) -> None:
        """Raise QuotaExceeded if the quota allows no further request now."""
        most = self.entry.max_concurrent_requests
        if most is not None and self.num_running >= most:
            self._refuse(f"has {self.num_running} requests in progress; its limit is {most}", 1)
        if self._requests is not None and (wait_s := self._requests.wait_s()):
            self._refuse(f"has made {self._requests.limit} requests in a minute, which is its limit", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s()):
            self._refuse(f"has used {self._tokens.limit} tokens in a minute, which is its limit", wait_s)

    def _refuse(self, reason: str, wait_s: float) -> None:
        self.num_refused += 1
        seconds = math.ceil(wait_s)
        raise QuotaExceeded(f"the API key named {self.name} {reason}. Try again in {seconds} s", seconds)

    def begin(self) -> None:
        """Count a request that begins. Call `end` when it ends."""
        self.num_requests += 1
        self.num_running += 1
        if self._requests is not None:
            self._requests.spend(1)

    def end(self) -> None:
        """Count the end of a request."""
        self.num_running -= 1

    def count_tokens(self, *, prompt: int = 0, generated: int = 0) -> None:
        """Count tokens of prompts or of answers toward the quota."""
        self.num_prompt_tokens += prompt
        self.num_generated_tokens += generated
        if self._tokens is not None:
            self._tokens.spend(prompt + generated)


class Clients:
    """The clients that may use the service. Their file can be read again while the service runs."""

    def __init__(self, config: ServiceConfig) -> None:
        """Read the file in `config`, if there is one. Raise InputError if it is invalid."""
        self.file = config.api_key_file
        self.watched = WatchedFiles([self.file])
        self._unnamed = [Client("", _Entry(key)) for key in config.api_key]
        self._named: dict[str, Client] = {}
        self.reload()

    def __bool__(self) -> bool:
        return bool(self._unnamed or self.file)

    @property
    def named(self) -> Sequence[Client]:
        """Clients in the file."""
        return [*self._named.values()]

    @property
    def keys(self) -> Sequence[str]:
        """All keys, which must not be logged."""
        return [client.entry.key for client in (*self._unnamed, *self._named.values())]

    def find(self, digest: bytes) -> Client | None:
        """Return the client whose key has this SHA-256 digest.

        All digests have the same length, and all are compared, so the response time reveals nothing about the keys.
        """
        found = [one for one in (*self._unnamed, *self._named.values()) if compare_digest(digest, one.digest)]
        return found[0] if found else None

    def reload(self) -> None:
        """Read the file again. Clients that stay keep their counts. Raise InputError if the file is invalid."""
        if self.file is None:
            return
        entries = _read(self.file)
        by_key = {client.entry.key: "--api-key" for client in self._unnamed}
        for name, entry in entries.items():
            if (other := by_key.setdefault(entry.key, name)) != name:
                raise InputError(f"{self.file}: {name} has the same key as {other}; give each name its own key")
        known = self._named
        self._named = {name: known.get(name) or Client(name, entry) for name, entry in entries.items()}
        for name, client in self._named.items():
            if client.entry != entries[name]:
                client.set(entries[name])
        if known:
            _log.info("read %s again: %d API keys", self.file, len(entries))


def _read(file: Path) -> Mapping[str, _Entry]:
    """Return the tables of the file by name. Raise InputError, whose message contains no key, if it is invalid."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"api_key_file: {file} is not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InputError(f"api_key_file: {file} cannot be read: {reason}") from None
    if not tables:
        raise InputError(f"api_key_file: {file} has no keys; add a table for each, such as [alice] with key = '...'")
    return {name: _entry(file, name, table) for name, table in tables.items()}


def _entry(file: Path, name: str, table: object) -> _Entry:
    if not _NAME.fullmatch(name):
        raise InputError(
            f"api_key_file: {file}: a name must have 1 to 64 letters, digits and . _ @ -"
        )  # it may be a key
    try:
        entry = msgspec.convert(table, _Entry)
    except msgspec.ValidationError as error:  # its message contains no values
        raise InputError(f"api_key_file: {file}: [{name}]: {error}") from None
    if not is_key(entry.key):
        raise InputError(
            f"api_key_file: {file}: [{name}]: the key is empty or has a character that an HTTP header cannot have; use "
            "printable ASCII"
        )
    return entry
