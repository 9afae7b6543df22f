"""Limits of one call of a tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindie_mm.nn.splice import ItemRef, MediaItem


@dataclass(frozen=True, slots=True)
class TowerLimits:
    """Limits of one call of a tower. A single item that exceeds the limits is still accepted."""

    tokens: int
    """Maximum number of features."""
    num_bytes: int
    """Maximum size of the items' arrays and features in bytes."""
    feature_bytes: int
    """Size of one feature in bytes."""


class TowerBudget:
    """The remaining budget of one call. The first item always fits, and a repeated item uses no budget."""

    def __init__(self, limits: TowerLimits) -> None:
        self._limits = limits
        self._tokens = limits.tokens
        self._bytes = limits.num_bytes
        self._items: set[bytes | ItemRef] = set()

    def num_fitting(self, items: Sequence[MediaItem]) -> int:
        """Return how many `items`, counted from the first, fit together. The budget does not change."""
        trial = TowerBudget(self._limits)
        trial._tokens, trial._bytes, trial._items = self._tokens, self._bytes, set(self._items)
        for number, item in enumerate(items):
            if not trial.can_take(item):
                return number
            trial.take(item)
        return len(items)

    def can_take(self, item: MediaItem) -> bool:
        """Return whether the item fits."""
        if not self._items or item.key in self._items:
            return True
        return item.shape.num_features <= self._tokens and self._cost(item) <= self._bytes

    def take(self, item: MediaItem) -> None:
        """Subtract the item from the budget, even if it does not fit."""
        if item.key not in self._items:
            self._items.add(item.key)
            self._tokens -= item.shape.num_features
            self._bytes -= self._cost(item)

    def _cost(self, item: MediaItem) -> int:
        return item.view.nbytes + item.shape.num_features * self._limits.feature_bytes
