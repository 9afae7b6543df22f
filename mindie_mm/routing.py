"""The choice of an engine for a request, by the content that engines have computed and by their load.

The engines of one service and the replicas of a cluster are chosen by the same rule. This module needs no other part of
the project, so that a router can import it quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cachetools import LRUCache


@dataclass(frozen=True, slots=True)
class Content:
    """A part of a request that an engine may have computed before: a media item, or the beginning of the prompt."""

    key: bytes
    """Digest of the part. Equal parts have equal keys."""
    num_tokens: int
    """Number of prompt tokens that the engine need not compute again if it holds the part."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The state of an engine, for one request."""

    name: str
    """Name of the engine. It must not change while the engine holds content."""
    queued_tokens: int
    """Number of tokens that the engine has accepted, but not computed."""
    held_tokens: int
    """Number of tokens of the request that the engine need not compute again (`HeldContent.num_tokens`)."""


def order(
    candidates: Sequence[Candidate], surplus_tokens: int, first_key: bytes = b"", *, spread: bool = True
) -> list[int]:
    """Return the indices of the candidates, best first.

    The best candidate holds most of the request, and has at most `surplus_tokens` queued tokens more than the least
    loaded candidate. If several candidates hold equally much, for example nothing, the least loaded one is best. If
    their load is equal, too, the request's first key decides, by rendezvous hashing (Thaler and Ravishankar, "Using
    name-based mappings to increase hit rates", 1998).

    Args:
        candidates: Engines that accept requests.
        surplus_tokens: Maximum difference in queued tokens between the chosen candidate and the least loaded one.
            Candidates with a larger difference come last, by their load.
        first_key: Key of the request's first content.
        spread: Whether the load decides between candidates that hold equally much. If it is False, only the first key
            decides. Routers that do not know each other's requests then choose the same engine for new content.

    """
    least = min((candidate.queued_tokens for candidate in candidates), default=0)

    def rank(index: int) -> tuple[bool, int, int, bytes]:
        candidate = candidates[index]
        home = blake2b(candidate.name.encode() + b" " + first_key, digest_size=8).digest()
        if candidate.queued_tokens - least > surplus_tokens:
            return True, candidate.queued_tokens, 0, home
        return False, -candidate.held_tokens, candidate.queued_tokens if spread else 0, home

    return sorted(range(len(candidates)), key=rank)


class HeldContent:
    """A record of the content that one engine probably holds, because it was sent there recently."""

    def __init__(self, capacity_tokens: int) -> None:
        """Create an empty record, which forgets the oldest content above `capacity_tokens` tokens."""
        self._contents = LRUCache[bytes, int](capacity_tokens, getsizeof=lambda num_tokens: num_tokens)

    def num_tokens(self, contents: Sequence[Content]) -> int:
        """Return how many tokens of `contents` the engine holds."""
        return sum(content.num_tokens for content in contents if content.key in self._contents)

    def add(self, contents: Sequence[Content]) -> None:
        """Record that a request with `contents` was sent to the engine."""
        for content in contents:
            # Content without tokens saves nothing, and would never be forgotten.
            if 0 < content.num_tokens <= self._contents.maxsize:
                self._contents[content.key] = content.num_tokens

    def clear(self) -> None:
        """Forget all content, because the engine was restarted."""
        self._contents.clear()
