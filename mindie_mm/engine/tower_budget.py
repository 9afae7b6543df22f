"""How much the towers take on at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindie_mm.nn.splice import ItemRef, MediaItem


@dataclass(frozen=True, slots=True)
class TowerLimits:
    """What one call may hold, unless a single item is more."""

    tokens: int
    """Features."""
    num_bytes: int
    """Bytes of the items' arrays and features."""
    feature_bytes: int
    """Bytes of one feature."""


class TowerBudget:
    """What is left of the limits. The first item always fits, and one that is in already costs nothing."""

    def __init__(self, limits: TowerLimits) -> None:
        self._limits = limits
        self._tokens = limits.tokens
        self._bytes = limits.num_bytes
        self._items: set[bytes | ItemRef] = set()

    def num_fitting(self, items: Sequence[MediaItem]) -> int:
        """How many of `items`, from the first on, fit together; none is taken."""
        trial = TowerBudget(self._limits)
        trial._tokens, trial._bytes, trial._items = self._tokens, self._bytes, set(self._items)
        for number, item in enumerate(items):
            if not trial.can_take(item):
                return number
            trial.take(item)
        return len(items)

    def can_take(self, item: MediaItem) -> bool:
        """Whether the item fits."""
        if not self._items or item.key in self._items:
            return True
        return item.shape.num_features <= self._tokens and self._cost(item) <= self._bytes

    def take(self, item: MediaItem) -> None:
        """Takes the item, whether it fits or not."""
        if item.key not in self._items:
            self._items.add(item.key)
            self._tokens -= item.shape.num_features
            self._bytes -= self._cost(item)

    def _cost(self, item: MediaItem) -> int:
        return item.view.nbytes + item.shape.num_features * self._limits.feature_bytes
