"""Features of the media that a step needs, from the cache or the towers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Step

from torch import Tensor

from mindie_mm import faults
from mindie_mm.engine.encoder_cache import EncoderCache
from mindie_mm.engine.scheduler import Scheduled
from mindie_mm.engine.sequence import Sequence
from mindie_mm.engine.tower_budget import TowerBudget, TowerLimits
from mindie_mm.errors import DeviceError, MindieMMError
from mindie_mm.nn.model import MediaModel
from mindie_mm.nn.splice import ItemRef, MediaItem

_log = logging.getLogger(__name__)

Features = dict[ItemRef, Tensor]
"""[num_features, hidden] of each media item of a step."""


class Towers:
    """Runs a model's towers, as much at once as the limits hold."""

    def __init__(self, model: MediaModel, encoder_cache: EncoderCache, limits: TowerLimits) -> None:
        self._model = model
        self._encoder_cache = encoder_cache
        self._limits = limits

    def encode(self, step: Step[Scheduled]) -> tuple[Features, dict[Sequence, MindieMMError]]:
        """Features of the step's media, from the cache or the tower, and the sequences whose media failed."""
        features: Features = {}
        failed: dict[Sequence, MindieMMError] = {}
        missing: list[tuple[Sequence, MediaItem]] = []
        for scheduled in step:
            for item in scheduled.sequence.items_in(scheduled.start, scheduled.stop):
                if (cached := self._encoder_cache.get(item)) is not None:
                    features[item.ref] = cached
                else:
                    missing.append((scheduled.sequence, item))
        # One call for as many as the limits hold; if it fails, one for each, so that a lost block fails its own request
        # alone.
        groups = self._within_limits(missing)
        while groups:
            group = [(sequence, item) for sequence, item in groups.pop() if sequence not in failed]
            if not group:
                continue
            try:
                self._run_tower(group, features)
            except Exception as error:  # noqa: BLE001 - what a device raises is no more the neighbours' fault
                if len(group) > 1:
                    groups += [[pair] for pair in group]
                    continue
                if not isinstance(error, MindieMMError):
                    _log.exception("the tower failed on %s", group[0][1].ref)
                    error = DeviceError(f"the tower failed: {type(error).__name__}")
                failed[group[0][0]] = error
        return features, failed

    def _run_tower(self, group: list[tuple[Sequence, MediaItem]], features: Features) -> None:
        # The same content twice in a step is computed once.
        distinct = {item.digest or item.ref: item for _, item in group}
        faults.point("before-tower")
        start = time.perf_counter()
        encoded = dict(zip(distinct, self._model.encode(list(distinct.values())), strict=True))
        faults.point("after-tower")
        seconds = time.perf_counter() - start
        for sequence, item in group:
            features[item.ref] = encoded[item.digest or item.ref]
            sequence.tower_s += seconds / len(group)
        for key, item in distinct.items():
            self._encoder_cache.put(item, encoded[key])

    def _within_limits(self, missing: list[tuple[Sequence, MediaItem]]) -> list[list[tuple[Sequence, MediaItem]]]:
        groups: list[list[tuple[Sequence, MediaItem]]] = []
        budget = TowerBudget(self._limits)
        for sequence, item in missing:
            if not groups or not budget.can_take(item):
                groups.append([])
                budget = TowerBudget(self._limits)
            budget.take(item)
            groups[-1].append((sequence, item))
        return groups
