"""Responses that later requests may refer to, in the memory of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from cachetools import TTLCache

from mindie_mm.errors import LimitExceeded, NotStored

MAX_CHAIN = 1024
"""Maximum number of responses that precede a response."""
_ITEM_BYTES = 512
"""Estimated size of an item besides its JSON."""
_ENTRY_BYTES = 2048
"""Estimated size of a stored response besides its JSON. It also bounds the number of responses."""
_MAX_SHOWN = 80


class _Item:
    """The JSON of an item. Conversations that contain equal items share them."""

    __slots__ = ("__weakref__", "content")

    def __init__(self, content: bytes) -> None:
        self.content = content


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and its own input, without the input of earlier responses."""

    response: bytes
    """JSON of the response."""
    input: Sequence[_Item]
    output: Sequence[_Item]
    previous_id: str | None

    @property
    def num_bytes(self) -> int:
        """Estimated size of the entry. Shared items are counted in each entry."""
        items = (_ITEM_BYTES + len(item.content) for item in (*self.input, *self.output))
        return _ENTRY_BYTES + len(self.response) + sum(items)

    def decoded(self) -> dict[str, Any]:
        """Return the response."""
        return msgspec.json.decode(self.response, type=dict[str, Any])

    def input_items(self) -> list[dict[str, Any]]:
        """Return the items of the input that is new in the response."""
        return [msgspec.json.decode(item.content) for item in self.input]


class ResponseStore:
    """The most recently used responses of each API key.

    Only requests with the same key reach a response, so each method takes the digest of the key, `owner`. A service
    without keys does not check the keys of its clients, which may invent any number of them.
    """

    def __init__(self, max_bytes: int, max_age_s: float, *, has_keys: bool) -> None:
        """Create a store.

        Args:
            max_bytes: Maximum size of the responses of one key, or without keys, of all responses. 0 turns off the
                store.
            max_age_s: Time in seconds after which a response is removed.
            has_keys: Whether the service has keys.

        """
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._has_keys = has_keys
        self._responses: dict[bytes, TTLCache[tuple[bytes, str], Stored]] = {}
        self._shared = WeakValueDictionary[bytes, _Item]()
        """Items by the digest of owner and content."""
        self._named = WeakValueDictionary[tuple[bytes, str], _Item]()
        """Items by owner and id."""
        self._running: dict[tuple[bytes, str], tuple[Mapping[str, Any], asyncio.Event]] = {}

    @property
    def is_on(self) -> bool:
        """True if responses are stored."""
        return self._max_bytes > 0

    @property
    def why_missing(self) -> str:
        """The reason why a response is not stored, for error messages."""
        if not self.is_on:
            return "is not stored, because this service stores no responses (--response-store-bytes)"
        return "is not stored, was deleted, or has expired"

    def put(self, owner: bytes, response: dict[str, Any], given: Sequence[dict[str, Any]]) -> None:
        """Store a response with the items of its input. A response larger than the store is not stored."""
        output = [self._share(owner, item) for item in response["output"]]
        stored = Stored(
            response=msgspec.json.encode(response),
            input=[self._share(owner, item) for item in given],
            output=output,
            previous_id=response["previous_response_id"],
        )
        if stored.num_bytes > self._max_bytes:
            return
        for name, cache in [*self._responses.items()]:
            cache.expire()
            if not cache:
                del self._responses[name]
        cache = self._responses.setdefault(
            self._name(owner), TTLCache(self._max_bytes, self._max_age_s, getsizeof=_size)
        )
        cache[owner, response["id"]] = stored
        for item, shared in zip([*given, *response["output"]], [*stored.input, *output], strict=True):
            self._named[owner, item["id"]] = shared

    def get(self, owner: bytes, response_id: str) -> Stored | None:
        """Return a response, or None if none with this id is stored for the key."""
        cache = self._responses.get(self._name(owner))
        return None if cache is None else cache.get((owner, response_id))

    def item(self, owner: bytes, item_id: str) -> dict[str, Any] | None:
        """Return an item of a stored response, or None."""
        item = self._named.get((owner, item_id))
        return None if item is None else msgspec.json.decode(item.content)

    def delete(self, owner: bytes, response_id: str) -> bool:
        """Remove a response. Return whether it was stored."""
        cache = self._responses.get(self._name(owner))
        return cache is not None and cache.pop((owner, response_id), None) is not None

    def conversation(self, owner: bytes, response_id: str, *, whole: bool = True) -> list[dict[str, Any]]:
        """Return the items of a response and of all responses before it, in order.

        If `whole` is false, the conversation may begin after a response that is not stored.

        Raises:
            NotStored: A response is not stored.
            LimitExceeded: More than `MAX_CHAIN` responses precede the response.

        """
        chain: list[Stored] = []
        following: str | None = response_id
        while following is not None:
            if (stored := self.get(owner, following)) is None:
                if not whole:
                    break
                raise NotStored(
                    f"previous_response_id refers to the response {following[:_MAX_SHOWN]!r}, which "
                    f"{self.why_missing}; send the whole conversation as input",
                    param="previous_response_id",
                )
            if len(chain) == MAX_CHAIN:
                raise LimitExceeded(
                    f"more than {MAX_CHAIN} responses precede the response; send the conversation as input",
                    param="previous_response_id",
                )
            chain.append(stored)
            following = stored.previous_id
        items = [item for stored in reversed(chain) for item in (*stored.input, *stored.output)]
        return [msgspec.json.decode(item.content) for item in items]

    @contextmanager
    def running(self, owner: bytes, response: Mapping[str, Any]) -> Iterator[asyncio.Event]:
        """Keep a response that is being generated. Yield the event that is set when its client cancels it."""
        key = owner, response["id"]
        cancelled = asyncio.Event()
        self._running[key] = response, cancelled
        try:
            yield cancelled
        finally:
            del self._running[key]

    def found(self, owner: bytes, response_id: str) -> Mapping[str, Any]:
        """Return a response that is stored or being generated. Raise NotStored if there is none."""
        if (running := self._running.get((owner, response_id))) is not None:
            return running[0]
        return self.require(owner, response_id).decoded()

    def require(self, owner: bytes, response_id: str) -> Stored:
        """Return a stored response. Raise NotStored if it is not stored."""
        if (stored := self.get(owner, response_id)) is None:
            raise NotStored(f"the response {response_id[:_MAX_SHOWN]!r} {self.why_missing}")
        return stored

    def cancel(self, owner: bytes, response_id: str) -> Mapping[str, Any] | None:
        """Cancel a response that is being generated, and return it. Return None if there is no such response."""
        if (running := self._running.get((owner, response_id))) is None:
            return None
        running[1].set()
        return running[0]

    def _name(self, owner: bytes) -> bytes:
        """Return the name of the cache for the responses of `owner`."""
        return owner if self._has_keys else b""

    def _share(self, owner: bytes, item: dict[str, Any]) -> _Item:
        """Return an item with the JSON of `item`, the same one for equal items of the key."""
        content = msgspec.json.encode(item)
        return self._shared.setdefault(sha256(owner + content).digest(), _Item(content))


def _size(stored: Stored) -> int:
    return stored.num_bytes
