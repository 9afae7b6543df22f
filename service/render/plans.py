"""Plans of media that came before, and their hashes. All workers of a port share them.

A plan is found by a digest of everything that determines it: the item's source and options, the request's options, and
the request's API key and `cache_salt`. A plan therefore serves only requests of the key that sent or fetched the item,
as for decoders, which read the items of one key only. The source is the text of the request: base64, or a URL. The
content of a URL may change, so its plan is forgotten after a time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from blake3 import blake3
from cachetools import TLRUCache

from mindie_mm.inputs import KnownPlan, Media
from mindie_mm.media.fetch.urls import scheme_of
from mindie_mm.processes.tasks import off_loop
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.tokenize.prompt import PlannedPrompt, PlannedSpan
from mindie_mm.tokenize.requests import TokenizeRequest
from service.render.answer import Hashing

_KEY_BYTES = 32
_ENTRY_BYTES = 768
"""Memory of an entry in addition to its value."""
_NEVER_S = 1e9


class KnownItem(msgspec.Struct, frozen=True, array_like=True):
    """A media item that was planned before."""

    plan: KnownPlan
    hash: str


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """An entry to keep."""

    key: bytes
    value: bytes
    """A `KnownItem` as MessagePack."""
    is_url: bool
    """True if the entry is forgotten after a time."""


class PlanCache:
    """Entries by key, in the memory of one process. The least recently used ones are forgotten first."""

    def __init__(self, config: ServiceConfig) -> None:
        self._url_s = config.plan_url_s
        self._entries = TLRUCache[bytes, Kept](
            config.plan_cache_bytes,
            ttu=lambda _, kept, now: now + (self._url_s if kept.is_url else _NEVER_S),
            timer=time.monotonic,
            getsizeof=lambda kept: _ENTRY_BYTES + len(kept.value),
        )

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, or None."""
        found = [self._entries.get(key) for key in keys]
        return [None if kept is None else kept.value for kept in found]

    def keep(self, entries: Sequence[Kept]) -> None:
        """Keep entries. Leave out those that are larger than the cache, and URLs whose plans are not kept."""
        for kept in entries:
            if _ENTRY_BYTES + len(kept.value) <= self._entries.maxsize and (self._url_s or not kept.is_url):
                self._entries[kept.key] = kept


class Report(msgspec.Struct, frozen=True, array_like=True):
    """The state of one worker."""

    metrics: bytes
    """Page of metrics."""
    num_requests: int
    """Number of requests in progress."""


class Shared(ABC):
    """What the workers of one port share: the plans of media. Each of them also knows what the others report."""

    @abstractmethod
    async def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key of the `PlanCache`, or None."""

    @abstractmethod
    def keep(self, entries: Sequence[Kept]) -> None:
        """Keep entries in the `PlanCache`."""

    @abstractmethod
    def watch(self, report: Callable[[], Report]) -> None:
        """Call `report` in a thread when another worker asks for the state of this one."""

    @abstractmethod
    async def reports(self, own: Report) -> Mapping[str, Report]:
        """Return the reports of the workers that answer, by name. `own` is this worker's. Empty without others."""


class Alone(Shared):
    """The plans of the only worker of a port."""

    def __init__(self, config: ServiceConfig) -> None:
        self._cache = PlanCache(config)

    async def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._cache.find(keys)

    def keep(self, entries: Sequence[Kept]) -> None:
        self._cache.keep(entries)

    def watch(self, report: Callable[[], Report]) -> None:
        """Do nothing, because there is no other worker."""

    async def reports(self, own: Report) -> Mapping[str, Report]:
        return {}


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one item."""

    any_counts: bytes
    """Key of a plan that does not depend on the numbers of items of the prompt."""
    these_counts: bytes
    """Key of a plan that depends on them."""
    is_url: bool
    named: _Keys | None
    """Keys under which a later request finds the item by its `uuid` alone, or None if these are such keys."""

    @property
    def all(self) -> Sequence[bytes]:
        """Keys of the plan itself, and then of the plan to which the `uuid` refers."""
        own = (self.any_counts, self.these_counts)
        return own if self.named is None else (*own, *self.named.all)


class KnownMedia:
    """The media of one request that were planned before."""

    def __init__(self, shared: Shared, hashing: Hashing, owner: bytes, salt: str) -> None:
        """Create the view of a request. `owner` is the digest of its API key, and `salt` its `cache_salt`."""
        self._shared = shared
        self._hashing = hashing
        self._domain = owner, salt
        self._keys: list[list[_Keys | None]] = []
        """Keys of the items of each prompt. None for an item whose plan is not kept."""
        self._known: list[list[KnownItem | None]] = []

    async def find(self, requests: Sequence[TokenizeRequest]) -> list[list[KnownItem | None]]:
        """Return what is known about the items of each prompt, in order. Call this method once.

        An item with data and a `uuid` is known only if the `uuid` still refers to the same data. Otherwise, the store
        of data by `uuid` must get the data.
        """
        self._keys = [
            await off_loop(_length(request.media), partial(self._keys_of, request.media)) for request in requests
        ]
        asked = [key for own in self._keys for one in own if one for key in one.all]
        found = iter(await self._shared.find(asked) if asked else [])
        decoder = msgspec.msgpack.Decoder(KnownItem)

        def next_value(keys: _Keys) -> bytes | None:
            any_counts, these_counts = next(found), next(found)
            own = any_counts or these_counts
            return own if keys.named is None or next_value(keys.named) == own else None

        def next_item(keys: _Keys | None) -> KnownItem | None:
            value = None if keys is None else next_value(keys)
            return None if value is None else decoder.decode(value)

        self._known = [[next_item(keys) for keys in own] for own in self._keys]
        return self._known

    def keep(self, index: int, plan: PlannedPrompt, hashes: Sequence[str]) -> None:
        """Keep the plans of prompt number `index`. `hashes` are those of its spans.

        A plan that was known is not kept again, because the time of a URL begins when it is fetched.
        """
        entries = []
        shown = slice(plan.first_item, plan.first_item + len(plan.spans))
        known = zip(self._keys[index][shown], self._known[index][shown], strict=True)
        for (keys, one), span, own in zip(known, plan.spans, hashes, strict=True):
            if keys is None:
                continue
            if one is None:
                entries += [_kept(key, span, own) for key in (keys, keys.named) if key is not None]
        if entries:
            self._shared.keep(entries)

    def _keys_of(self, media: Sequence[Media]) -> list[_Keys | None]:
        """Return the keys of each item of a prompt, or None if its plan is not kept.

        Embeddings are no media. Data that are kept under a `uuid` are found by the `uuid`, because another worker may
        have got other data for it since then.
        """
        counts = repr(sorted(Counter(item.kind for item in media).items()))
        return [None if item.is_embeddings else self._keys_of_item(item, counts) for item in media]

    def _keys_of_item(self, item: Media, counts: str) -> _Keys | None:
        parts = _parts(item)
        if item.uuid is None and not all(type(part) is str for part in parts):
            return None
        texts = [part for part in parts if isinstance(part, str)]
        options = [self._hashing.options, item.kind, item.options, item.uuid]
        lengths = [len(text) for text in texts]
        digest = blake3(repr([*self._domain, options, lengths]).encode())
        for text in texts:
            digest.update(text.encode("utf-8", "surrogatepass"))
        own = digest.digest(_KEY_BYTES)
        # Base64 may begin with a slash, too. Its plan is then forgotten early.
        is_url = any(scheme_of(text) not in ("", "data") or text.startswith("/") for text in texts)
        named = None
        if item.uuid is not None and texts:
            named = self._keys_of_item(msgspec.structs.replace(item, source=None), counts)
        return _Keys(own, blake3(own + counts.encode()).digest(_KEY_BYTES), is_url, named)


def _parts(item: Media) -> Sequence[object]:
    return item.source if isinstance(item.source, tuple) else (item.source,)


def _length(media: Sequence[Media]) -> int:
    """Return the number of characters to hash."""
    return sum(len(part) for item in media for part in _parts(item) if isinstance(part, str))


def _kept(keys: _Keys, span: PlannedSpan, own: str) -> Kept:
    value = msgspec.msgpack.encode(KnownItem(KnownPlan(span.plan, span.digest), own))
    return Kept(keys.these_counts if span.by_counts else keys.any_counts, value, keys.is_url)
