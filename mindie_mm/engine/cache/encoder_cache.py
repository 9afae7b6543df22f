"""Features of media, kept by content, so that a tower runs once for a picture that comes again."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from mindie_mm.nn.splice import ItemRef, MediaItem


class EncoderCache:
    """Least recently used features go first. An item without a digest is kept for its own request's chunks only."""

    def __init__(self, capacity_bytes: int) -> None:
        self.queries = 0
        self.hits = 0
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._features: OrderedDict[bytes | ItemRef, Tensor] = OrderedDict()

    def __contains__(self, item: MediaItem) -> bool:
        return item.key in self._features

    def get(self, item: MediaItem) -> Tensor | None:
        """The item's features, [num_features, hidden], or None."""
        features = self._features.get(item.key)
        if features is not None:
            self._features.move_to_end(item.key)
        return features

    def put(self, item: MediaItem, features: Tensor) -> None:
        """Keeps the item's features; those that were used longest ago make room, so that one item always fits."""
        self.drop(item)
        if features.untyped_storage().nbytes() > features.nbytes:
            features = features.clone()  # a view would keep the features of all its neighbours
        self._features[item.key] = features
        self._bytes += features.nbytes
        while self._bytes > self._capacity_bytes and len(self._features) > 1:
            self._bytes -= self._features.popitem(last=False)[1].nbytes

    def drop(self, item: MediaItem) -> None:
        """Forgets the item's features, if it has any here."""
        if (features := self._features.pop(item.key, None)) is not None:
            self._bytes -= features.nbytes

    def count(self, items: list[MediaItem]) -> None:
        """Counts a new request's items as queries, and those that are here as hits."""
        self.queries += len(items)
        self.hits += sum(item in self for item in items)
