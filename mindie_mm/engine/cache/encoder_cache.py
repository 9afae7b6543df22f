"""A cache of media features by content. A tower encodes a repeated image only once."""

from __future__ import annotations

from cachetools import LRUCache
from torch import Tensor

from mindie_mm.nn.splice import ItemKey, MediaItem


class EncoderCache:
    """A cache of features with least-recently-used eviction.

    Features of an item without a digest are used only within the item's own request.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.queries = 0
        self.hits = 0
        self.capacity_bytes = capacity_bytes
        # A single item always fits, because a step cannot read features that are not in the cache.
        most = max(capacity_bytes, 1)
        self._features = LRUCache[ItemKey, Tensor](most, getsizeof=lambda features: min(features.nbytes, most))

    def __contains__(self, item: MediaItem) -> bool:
        return item.key in self._features

    def get(self, item: MediaItem) -> Tensor | None:
        """Return the item's features, [num_features, hidden], or None."""
        return self._features.get(item.key)

    def put(self, item: MediaItem, features: Tensor) -> None:
        """Store the item's features, and evict other features if necessary. A single item always fits."""
        if features.untyped_storage().nbytes() > features.nbytes:
            features = features.clone()  # a view would keep the memory of the whole batch alive
        self._features[item.key] = features

    def free(self, item: MediaItem) -> None:
        """Remove the item's features, if they are in the cache."""
        self._features.pop(item.key, None)

    def count(self, items: list[MediaItem]) -> None:
        """Count the items of a new request as queries, and cached items as hits."""
        self.queries += len(items)
        self.hits += sum(item in self for item in items)
