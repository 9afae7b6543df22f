"""Which tokens of which sequences the next step computes.

Every sequence lacks some tokens in the cache: a decode lacks one, a prefill many. One rule serves both: give each
sequence as many of them as the step's budgets hold, running ones first. (Continuous batching with chunked prefill:
Yu et al., Orca, 2022; Agrawal et al., Sarathi, 2023.)
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from mindie_mm.config import EngineConfig
from mindie_mm.engine.block_pool import BlockPool
from mindie_mm.engine.encoder_cache import EncoderCache
from mindie_mm.engine.sequence import Sequence
from mindie_mm.nn.splice import MediaItem


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens [start, stop) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the last of them is the sequence's last, so that the next token is drawn."""
        return self.stop == self.sequence.num_tokens


@dataclass(slots=True)
class _Budget:
    """What one step may still take on."""

    tokens: int
    tower_tokens: int
    tower_items: set[bytes]
    """Digests that the tower computes in this step already."""


class Scheduler:
    """Sequences that wait, and those that run; first come, first served, the last come is preempted first."""

    def __init__(self, config: EngineConfig, blocks: BlockPool, encoder_cache: EncoderCache) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._config = config
        self._blocks = blocks
        self._encoder_cache = encoder_cache

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that finished, failed or was aborted, and takes its blocks back."""
        self._blocks.free(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step; empty only when nothing is left to run."""
        config = self._config
        budget = _Budget(config.max_num_batched_tokens, config.max_tower_tokens, set())
        preemptions = self.preemptions
        step = [
            scheduled
            for sequence in tuple(self.running)
            if sequence in self.running and (scheduled := self._schedule(sequence, budget))
        ]
        while self.waiting and len(self.running) < config.max_num_seqs and preemptions == self.preemptions:
            scheduled = self._admit(self.waiting[0], budget)
            if scheduled is None:
                break
            self.running.append(self.waiting.popleft())
            step.append(scheduled)
        return step

    def _schedule(self, sequence: Sequence, budget: _Budget) -> Scheduled | None:
        """A running sequence's share; sequences behind it, in the end itself, give up their blocks for it."""
        stop = self._stop(sequence, budget)
        if stop == sequence.num_computed:
            return None
        while not self._blocks.can_grow(sequence, stop):
            last = self.running.pop()
            self._preempt(last)
            if last is sequence:
                return None
        return self._take(sequence, stop, budget)

    def _admit(self, sequence: Sequence, budget: _Budget) -> Scheduled | None:
        stop = self._stop(sequence, budget)
        if stop == sequence.num_computed or not self._blocks.can_grow(sequence, stop):
            return None
        sequence.scheduled_s = sequence.scheduled_s or time.monotonic()
        return self._take(sequence, stop, budget)

    def _take(self, sequence: Sequence, stop: int, budget: _Budget) -> Scheduled:
        self._blocks.grow(sequence, stop)
        start, sequence.num_computed = sequence.num_computed, stop
        budget.tokens -= stop - start
        for item in self._uncached(sequence, stop, budget, start):
            budget.tower_tokens -= item.shape.num_features
            if item.digest is not None:
                budget.tower_items.add(item.digest)
        return Scheduled(sequence, start, stop)

    def _stop(self, sequence: Sequence, budget: _Budget) -> int:
        """How far the budgets let the sequence go. The tower's may be overdrawn by the first item of a step."""
        stop = min(sequence.num_tokens, sequence.num_computed + budget.tokens)
        tower_tokens = budget.tower_tokens
        for item in self._uncached(sequence, stop, budget, sequence.num_computed):
            if item.shape.num_features > tower_tokens and tower_tokens < self._config.max_tower_tokens:
                return max(item.start, sequence.num_computed)
            tower_tokens -= item.shape.num_features
        return stop

    def _uncached(self, sequence: Sequence, stop: int, budget: _Budget, start: int) -> list[MediaItem]:
        return [
            item
            for item in sequence.items_in(start, stop)
            if item not in self._encoder_cache and item.digest not in budget.tower_items
        ]

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its tokens are kept and computed again."""
        self._blocks.free(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1
