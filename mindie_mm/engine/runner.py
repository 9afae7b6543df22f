"""One step on the device: towers for media that come into view, the decoder over the flat batch, the head."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Step
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindie_mm import faults
from mindie_mm.engine.encoder_cache import EncoderCache
from mindie_mm.engine.scheduler import Scheduled
from mindie_mm.engine.sequence import Sequence
from mindie_mm.engine.tower_budget import TowerBudget, TowerLimits
from mindie_mm.errors import DeviceError, MindieMMError
from mindie_mm.nn.attention import Chunk, PagedBatch, PagedCache
from mindie_mm.nn.model import Model
from mindie_mm.nn.splice import ItemRef, MediaItem, Splice

_log = logging.getLogger(__name__)

Features = dict[ItemRef, Tensor]
"""[num_features, hidden] of each media item of a step."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logits that tell how likely a prompt's own tokens were."""

    sequence: Sequence
    start: int
    """Index of the first token that they predict."""
    logits: Tensor
    """float32 [rows, vocabulary]."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of the rows that a step asks for; no other row goes through the head."""

    sampled: Tensor
    """float32 [sequences that draw a token, vocabulary], in the step's order."""
    prompts: list[PromptRows]


class Runner:
    """Runs scheduled tokens through a model and its KV cache."""

    def __init__(self, model: Model, cache: PagedCache, encoder_cache: EncoderCache, tower_limits: TowerLimits) -> None:
        self._model = model
        self._cache = cache
        self._encoder_cache = encoder_cache
        self._tower_limits = tower_limits

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
        budget = TowerBudget(self._tower_limits)
        for sequence, item in missing:
            if not groups or not budget.can_take(item):
                groups.append([])
                budget = TowerBudget(self._tower_limits)
            budget.take(item)
            groups[-1].append((sequence, item))
        return groups

    def forward(self, step: Step[Scheduled], features: Features) -> StepLogits:
        """The decoder over all of the step's tokens, the head over the rows asked for."""
        device = self._model.spec.device
        splices: list[Splice] = []
        sampled: list[int] = []
        prompts: list[tuple[Sequence, int, range]] = []
        row = 0
        for scheduled in step:
            sequence, start, stop = scheduled.sequence, scheduled.start, scheduled.stop
            for item in sequence.items_in(start, stop):
                first, last = item.features_in(start, stop)
                if first < last:
                    splices.append(Splice(row - start + item.slots[first:last], features[item.ref][first:last]))
            if sequence.params.prompt_logprobs is not None:
                first = max(start, len(sequence.prompt_logprobs))
                last = min(stop, sequence.num_prompt - 1)
                if first < last:
                    prompts.append((sequence, first + 1, range(row + first - start, row + last - start)))
            row += stop - start
            if scheduled.samples:
                sampled.append(row - 1)
        wanted = [*sampled, *(index for _, _, rows in prompts for index in rows)]
        logits = self._model.forward(
            torch.from_numpy(np.concatenate([s.sequence.ids(s.start, s.stop) for s in step])).to(device),
            torch.cat([s.sequence.positions(s.start, s.stop) for s in step], dim=1).to(device),
            splices,
            PagedBatch.build(
                [Chunk(s.start, s.stop, s.sequence.blocks, s.sequence.groups) for s in step], self._cache, device
            ),
            torch.tensor(wanted, dtype=torch.int64, device=device),
        )
        parts = logits.split([len(sampled), *(len(rows) for _, _, rows in prompts)])
        return StepLogits(
            parts[0],
            [PromptRows(sequence, first, part) for (sequence, first, _), part in zip(prompts, parts[1:], strict=True)],
        )
