"""Features of the media in a step. They are taken from the encoder cache or computed by the towers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mindie_mm.device import require_alive
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.ranks import Ranks
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.scheduler import Scheduled, TowerBudget, TowerLimits
from mindie_mm.errors import DeviceError, MindieMMError, without_frames
from mindie_mm.nn.lora.adapter import Adapter
from mindie_mm.nn.model import MediaModel
from mindie_mm.nn.placement import devices_of
from mindie_mm.nn.splice import ItemKey, ItemView, MediaItem
from mindie_mm.nn.staging import fetch
from mindie_mm.processes import faults
from mindie_mm.settings.config import MiB

_log = logging.getLogger(__name__)

Features = dict[ItemKey, Tensor]
"""Features of each media item of a step, [num_features, hidden], by `MediaItem.key`."""

_MOST_FETCHED_BYTES = 64 * MiB
"""Maximum size of prefetched media. About twenty images of 1420x720 pixels fit. Copying them takes 3 ms at 25
GB/s."""


def fetched_bytes(max_tower_bytes: int) -> int:
    """Return the maximum size of the media that are prefetched to an accelerator, in bytes."""
    return min(_MOST_FETCHED_BYTES, max_tower_bytes)


class Towers:
    """The towers of a model. A call to a tower encodes as many items as the limits allow."""

    def __init__(
        self, model: MediaModel, encoder_cache: EncoderCache, limits: TowerLimits, ranks: Ranks, *, by_item: bool
    ) -> None:
        """Prepare the towers. Each rank encodes some of the items if `by_item` is set, otherwise all items."""
        self._model = model
        self._ranks = ranks
        self._by_item = by_item and ranks.count > 1
        self._encoder_cache = encoder_cache
        self._limits = limits
        # With `by_item`, the rank that encodes an item is unknown until the item's step is scheduled.
        self._fetches = model.spec.device.type != "cpu" and not self._by_item

    def fetch(self, coming: Iterable[MediaItem]) -> None:
        """Copy media of later steps to the device while it computes the current step."""
        if not self._fetches:
            return
        left_bytes = fetched_bytes(self._limits.num_bytes)
        views: dict[ItemKey, ItemView] = {}
        for item in coming:
            if item.key not in views:
                left_bytes -= item.view.nbytes
                if left_bytes < 0:
                    break
                views[item.key] = item.view
        try:
            fetch(views.values(), self._model.spec.device)
        except Exception:  # noqa: BLE001 - their own step reads them again, and fails alone
            _log.debug("media of later steps cannot be prefetched", exc_info=True)
            self._require_alive()

    def encode(self, step: Sequence[Scheduled]) -> tuple[Features, dict[Request, MindieMMError]]:
        """Return the features of the step's media, and the errors of requests whose media failed."""
        features: Features = {}
        failed: dict[Request, MindieMMError] = {}
        missing: list[tuple[Request, MediaItem]] = []
        for scheduled in step:
            for item in scheduled.request.items_in(scheduled.start, scheduled.stop):
                if (cached := self._encoder_cache.get(item)) is not None:
                    features[item.key] = cached
                else:
                    missing.append((scheduled.request, item))
        # Call the tower once per group within the limits. If this fails, call it once per item, so that a lost block
        # only fails its own request.
        groups = self._within_limits(missing)
        while groups:
            group = [(request, item) for request, item in groups.pop() if request not in failed]
            if not group:
                continue
            if (failure := self._run_tower(group, features)) is None:
                continue
            if len(group) > 1:
                groups += [[pair] for pair in group]
            else:
                failed[group[0][0]] = failure
        return features, failed

    def encode_some(self, items: Sequence[MediaItem]) -> list[Tensor] | MindieMMError:
        """Encode as many items, counted from the first, as fit into one call to the tower.

        Return their features, or an error. The encoder cache is neither read nor filled.
        """
        first = items[: TowerBudget(self._limits).num_fitting(items)]
        encoded = self._encoded_once(first)
        return encoded if isinstance(encoded, MindieMMError) else [encoded[item.key] for item in first]

    def _run_tower(self, group: list[tuple[Request, MediaItem]], features: Features) -> MindieMMError | None:
        """Add the features of a group's items to `features`. If a rank fails, return its error and add no features."""
        faults.point("before-tower")
        start = time.perf_counter()
        adapter = group[0][0].tower_adapter
        encoded = self._encoded_once([item for _, item in group], adapter)
        if isinstance(encoded, MindieMMError):
            return encoded
        faults.point("after-tower")
        seconds = time.perf_counter() - start
        for request, item in group:
            features[item.key] = encoded[item.key]
            request.tower_s += seconds / len(group)
        for key, item in {item.key: item for _, item in group}.items():
            self._encoder_cache.put(item, encoded[key])
        return None

    def _encoded_once(
        self, items: Sequence[MediaItem], adapter: Adapter | None = None
    ) -> dict[ItemKey, Tensor] | MindieMMError:
        """Return the features of each content by its key. A content that occurs several times is encoded once."""
        distinct: dict[ItemKey, MediaItem] = {}
        for item in items:
            distinct.setdefault(item.key, item)  # the first occurrence, as in `fetch`
        outputs = self._encoded(list(distinct.values()), adapter)
        return outputs if isinstance(outputs, MindieMMError) else dict(zip(distinct, outputs, strict=True))

    def _encoded(self, items: list[MediaItem], adapter: Adapter | None) -> list[Tensor] | MindieMMError:
        """Return the features of each item on all ranks, with a LoRA adapter or none.

        If a rank fails, return its error on all ranks.
        """
        ranks, spec = self._ranks, self._model.spec
        lengths = [item.shape.num_features for item in items]
        owners = ranks.owners(lengths) if self._by_item else [ranks.number] * len(items)
        own = [item for item, owner in zip(items, owners, strict=True) if owner == ranks.number]
        failure: MindieMMError | None = None
        try:
            with self._model.adapted([(adapter, 1)]):
                features = self._model.encode(own) if own else []
        except MindieMMError as error:
            failure = without_frames(error)
        except Exception as error:  # noqa: BLE001 - a device error must not fail other requests either
            if len(items) == 1:
                _log.exception("the tower failed on %s", items[0].ref)
            self._require_alive()
            failure = DeviceError(f"the tower failed: {type(error).__name__}")
        if (failure := ranks.all_reduce_error(failure)) is not None:
            return failure
        if not self._by_item:
            return features
        like = torch.empty(0, spec.hidden_size + spec.extra_width, dtype=spec.dtype, device=spec.device)
        return ranks.all_gather(features, owners, lengths, like)

    def _require_alive(self) -> None:
        """Raise an error if a device is lost. Call this before a retry, because the retry may not report the loss."""
        for device in devices_of(self._model):
            require_alive(device)

    def _within_limits(self, missing: list[tuple[Request, MediaItem]]) -> list[list[tuple[Request, MediaItem]]]:
        """Divide items into groups for one call each. All items of a group have the same LoRA adapter or none."""
        groups: list[list[tuple[Request, MediaItem]]] = []
        budget = TowerBudget(self._limits)
        for request, item in missing:
            changes = bool(groups) and groups[-1][0][0].tower_adapter is not request.tower_adapter
            if not groups or changes or not budget.can_take(item):
                groups.append([])
                budget = TowerBudget(self._limits)
            budget.take(item)
            groups[-1].append((request, item))
        return groups
