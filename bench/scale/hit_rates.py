"""A model of the caches of many replicas, by the way in which requests are routed to them.

Media are drawn from a Zipf distribution. Each replica keeps the media that it used last, and computes its requests one
after the other. A router's record of a replica (`HeldContent`) and the replica's cache follow the same rule, so the
record also stands for the cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mindie_mm.routing import Candidate, Content, HeldContent, order


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests. Each has one media item and some text."""

    media: int
    """Number of different media."""
    exponent: float
    """Exponent of the Zipf distribution: medium number i is asked for in proportion to i ** -exponent."""
    media_tokens: int
    text_tokens: int

    def popularity(self) -> NDArray[np.float64]:
        """Return the share of requests for each medium, the most popular first."""
        shares = np.arange(1, self.media + 1, dtype=np.float64) ** -self.exponent
        return shares / shares.sum()

    def draw(self, requests: int, seed: int) -> list[int]:
        """Return the number of the medium of each request."""
        return np.random.default_rng(seed).choice(self.media, requests, p=self.popularity()).tolist()


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a cluster."""

    number: int
    cache_tokens: int
    """Capacity of a replica's cache in tokens."""
    load: float
    """Share of the replicas' time that the requests would take if no medium were cached."""
    surplus_tokens: int
    """See `mindie_mm.routing.order`."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The result of a simulation, after the warm-up."""

    hit_rate: float
    """Share of the requests whose medium was in the cache of their replica."""
    queued_tokens_p99: float
    """99th percentile of the number of tokens that were in front of a request in its replica."""


SAMPLE = 16
"""Maximum number of equally loaded replicas that are ranked for a content that none of them holds."""


class Router:
    """A router, which knows the requests that it has sent itself, and the load of each replica."""

    def __init__(self, replicas: Replicas, *, spread: bool) -> None:
        self._replicas = replicas
        self._spread = spread
        self._held = [HeldContent(replicas.cache_tokens) for _ in range(replicas.number)]
        self._holders: dict[bytes, set[int]] = {}
        """Replicas that have received each content. Some may have forgotten it."""
        self._sample = random.Random(0)

    def choose(self, content: Content, queued: NDArray[np.int64]) -> int:
        """Return the first replica of `order`, and record that the content is sent there.

        `order` ranks only the replicas that may come first, because ranking a thousand takes milliseconds. If more than
        `SAMPLE` equally loaded replicas are left, where only a hash decides, a sample of them stands for all.
        """
        replica = self._first(content, queued)
        self._held[replica].add([content])
        self._holders.setdefault(content.key, set()).add(replica)
        return replica

    def _first(self, content: Content, queued: NDArray[np.int64]) -> int:
        surplus, least = self._replicas.surplus_tokens, int(queued.min())
        holders = self._holders.get(content.key, set())
        holders -= {replica for replica in holders if not self._held[replica].num_tokens([content])}
        some = [replica for replica in sorted(holders) if queued[replica] - least <= surplus]
        if some:
            some.append(int(queued.argmin()))  # without it, `order` would not know the least load
        elif self._spread:
            some = np.flatnonzero(queued == least).tolist()
            some = self._sample.sample(some, SAMPLE) if len(some) > SAMPLE else some
        else:
            home = next((home for home in _homes(content.key, len(queued)) if queued[home] - least <= surplus), None)
            return self._ranked(content, queued, range(len(queued))) if home is None else home
        return self._ranked(content, queued, some)

    def _ranked(self, content: Content, queued: NDArray[np.int64], some: Sequence[int]) -> int:
        candidates = [
            Candidate(str(index), int(queued[index]), self._held[index].num_tokens([content])) for index in some
        ]
        first = order(candidates, self._replicas.surplus_tokens, content.key, spread=self._spread)[0]
        return some[first]


@cache
def _homes(key: bytes, number: int) -> list[int]:
    """Return the first of `number` replicas for a content that none holds, if all have equally much work."""
    return order([Candidate(str(index), 0, 0) for index in range(number)], 0, key, spread=False)[:8]


POLICIES = ("content", "content, 8 routers", "round robin", "random")


def _choices(policy: str, replicas: Replicas, seed: int) -> Iterator[Router | int]:
    """Yield the router of each request, or the replica if no router chooses it."""
    draws = random.Random(seed)
    routers = [Router(replicas, spread=policy == "content") for _ in range({"content": 1}.get(policy, 8))]
    turn = 0
    while True:
        match policy:
            case "random":
                yield draws.randrange(replicas.number)
            case "round robin":
                yield turn % replicas.number
            case _:
                yield draws.choice(routers)
        turn += 1


def simulate(policy: str, replicas: Replicas, traffic: Traffic, requests: int, warm_up: int, seed: int = 0) -> Rates:
    """Simulate `warm_up` requests, and measure the `requests` after them. Time is counted in tokens of a replica."""
    caches = [HeldContent(replicas.cache_tokens) for _ in range(replicas.number)]
    free_at = np.zeros(replicas.number)
    arrivals = random.Random(seed)
    rate = replicas.load * replicas.number / (traffic.media_tokens + traffic.text_tokens)
    now, hits, ahead = 0.0, 0, []
    choices = _choices(policy, replicas, seed)
    for number, medium in enumerate(traffic.draw(warm_up + requests, seed)):
        now += arrivals.expovariate(rate)
        content = Content(medium.to_bytes(8), traffic.media_tokens)
        queued = np.ceil(np.maximum(free_at - now, 0)).astype(np.int64)
        choice = next(choices)
        replica = choice.choose(content, queued) if isinstance(choice, Router) else choice
        held = caches[replica].num_tokens([content])
        caches[replica].add([content])
        if number >= warm_up:
            hits += bool(held)
            ahead.append(int(queued[replica]))
        free_at[replica] = max(free_at[replica], now) + traffic.text_tokens + traffic.media_tokens - held
    return Rates(hits / requests, float(np.percentile(ahead, 99)))


def expected_hit_rate(popularity: NDArray[np.float64], capacity: int) -> float:
    """Return the hit rate of one cache of `capacity` media that forgets the least recently used medium.

    This is Che's approximation (Che, Tung and Wang, "Hierarchical web caching systems", 2002): each medium stays for
    the time in which `capacity` different media are asked for.
    """
    if capacity >= len(popularity):
        return 1.0
    low, high = 0.0, 1.0
    while (1 - np.exp(-popularity * high)).sum() < capacity:
        high *= 2
    while not math.isclose(low, high, rel_tol=1e-6):
        middle = (low + high) / 2
        if (1 - np.exp(-popularity * middle)).sum() < capacity:
            low = middle
        else:
            high = middle
    return float((popularity * (1 - np.exp(-popularity * high))).sum())
