"""The scheduler, which selects the sequences and tokens of the next step.

Each sequence has tokens that are not in the cache yet: one token for a decode, and many tokens for a prefill. The same
rule applies to both. A step contains as many tokens of each sequence as the step's budgets allow. Decodes are scheduled
first, then prompts that have begun, then new prompts. This is continuous batching with chunked prefill (Yu et al.,
Orca, 2022; Agrawal et al., Sarathi, 2023).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import abc, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.cache.prefix import extend_keys
from mindie_mm.engine.requests.sequence import Sequence
from mindie_mm.engine.tower_budget import TowerBudget, TowerLimits
from mindie_mm.nn.splice import MediaItem
from mindie_mm.settings.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens [start, stop) of a sequence that this step computes."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the end of the sequence. In this case the next token is drawn."""
        return self.stop == self.sequence.num_tokens


class BaseScheduler(ABC):
    """Queues of waiting and running sequences, in first-come, first-served order within a priority."""

    def __init__(self, config: EngineConfig, encoder_cache: EncoderCache, tower_limits: TowerLimits) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        """Number of prompt tokens that were looked up in the prefix cache."""
        self.prefix_hits = 0
        """Number of prompt tokens that were found in the prefix cache."""
        self._config = config
        self._encoder_cache = encoder_cache
        self._tower_limits = tower_limits

    @property
    @abstractmethod
    def usage(self) -> float:
        """Share of the KV cache that sequences use, in [0, 1]."""

    @abstractmethod
    def schedule(self) -> list[Scheduled]:
        """Return the next step. It is empty only if there is no sequence to run."""

    @abstractmethod
    def _let_go(self, sequence: Sequence) -> None:
        """Reclaim the memory of a running sequence."""

    def coming(self) -> Iterator[MediaItem]:
        """Yield media that later steps will probably encode, in the order in which they are needed."""
        for sequence in self.waiting:
            if not sequence.media_consumed:
                yield from (item for item in sequence.items if item not in self._encoder_cache)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the sequences that are more urgent, or as urgent and were asked for earlier."""
        at = len(self.waiting)
        while at and _turn(self.waiting[at - 1]) > _turn(sequence):
            at -= 1
        self.waiting.insert(at, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished, failed or been aborted, and reclaim its memory."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._let_go(sequence)
        else:
            self.waiting.remove(sequence)


def _turn(sequence: Sequence) -> tuple[int, float]:
    """Return a key that orders sequences by urgency and then by age."""
    return sequence.params.priority, sequence.asked_s


@dataclass(slots=True)
class _Budget:
    """The remaining budget of one step."""

    tokens: int
    tower: TowerBudget
    prompts: bool = False
    """Whether the step contains part of a prompt, and not only decodes."""
    keys: set[bytes] = field(default_factory=set)
    """Keys of the blocks that the step fills."""


class Scheduler(BaseScheduler):
    """A scheduler for a paged KV cache. If blocks run out, it preempts the latest of the least urgent sequences.

    When a waiting sequence is admitted, the blocks of its prefix are looked up in the cache. Tokens of the blocks that
    are found count as computed.
    """

    def __init__(
        self, config: EngineConfig, blocks: BlockPool, encoder_cache: EncoderCache, tower_limits: TowerLimits
    ) -> None:
        super().__init__(config, encoder_cache, tower_limits)
        self._blocks = blocks

    @property
    def usage(self) -> float:
        return self._blocks.usage

    def schedule(self) -> list[Scheduled]:
        config = self._config
        budget = _Budget(config.max_num_batched_tokens, TowerBudget(self._tower_limits))
        preemptions = self.preemptions
        step = []
        # Decodes come first. Otherwise an earlier prompt could use up the budget of the step.
        for sequence in sorted(self.running, key=lambda one: one.num_tokens - one.num_computed > 1):
            if sequence not in self.running:
                continue  # preempted in favor of an earlier sequence
            scheduled = self._schedule(sequence, budget)
            if scheduled is not None:
                step.append(scheduled)
        if preemptions != self.preemptions:  # admit no sequence, and remove preempted sequences from the step
            return [scheduled for scheduled in step if scheduled.sequence in self.running]
        while self.waiting and len(self.running) < config.max_num_seqs:
            scheduled = self._admit(self.waiting[0], budget)
            if scheduled is None:
                break
            self.running.append(self.waiting.popleft())
            step.append(scheduled)
        return step

    def coming(self) -> Iterator[MediaItem]:
        for sequence in self.running:
            if sequence.num_computed < sequence.num_prompt and not sequence.media_consumed:
                yield from self._uncached(sequence, sequence.num_computed, sequence.num_prompt)
        yield from super().coming()

    def computed(self, step: abc.Sequence[Scheduled]) -> None:
        """Let other sequences share the blocks that `step` filled. Call this before removing sequences of the step."""
        size = self._blocks.block_size
        for scheduled in step:
            blocks, keys = scheduled.sequence.kv_blocks, scheduled.sequence.keys
            for index in range(scheduled.start // size, min(scheduled.stop // size, len(keys))):
                self._blocks.keep(blocks[index], keys[index])

    def _schedule(self, sequence: Sequence, budget: _Budget) -> Scheduled | None:
        """Schedule a running sequence. If blocks run out, preempt other sequences first, and this sequence last."""
        stop = self._stop(sequence, sequence.num_computed, budget)
        if stop == sequence.num_computed:
            return None
        while not self._blocks.can_grow(sequence, stop):
            # Preempt the latest of the least urgent sequences. A sequence never yields to a less urgent sequence.
            index = max(range(len(self.running)), key=lambda one: (*_turn(self.running[one]), one))
            last = self.running.pop(index)
            self._preempt(last)
            if last is sequence:
                return None
        return self._take(sequence, stop, budget)

    def _admit(self, sequence: Sequence, budget: _Budget) -> Scheduled | None:
        extend_keys(sequence, self._blocks.block_size, sequence.num_tokens - 1)  # the last token is always computed
        shared = [] if sequence.params.prompt_logprobs is not None else self._blocks.find(sequence.keys)
        start = len(shared) * self._blocks.block_size
        if self._comes_soon(sequence, len(shared), budget):
            return None
        stop = self._stop(sequence, start, budget)
        if stop == start or not self._blocks.can_grow(sequence, stop, shared):
            return None
        self._blocks.share(sequence, shared)
        sequence.num_computed = start
        if sequence.num_cached is None:
            sequence.num_cached = start
            sequence.scheduled_s = time.monotonic()
            if sequence.num_shareable and sequence.params.prompt_logprobs is None:
                self.prefix_queries += sequence.num_prompt
                self.prefix_hits += start
        return self._take(sequence, stop, budget)

    def _comes_soon(self, sequence: Sequence, num_shared: int, budget: _Budget) -> bool:
        """Return whether this step fills blocks that would save the sequence at least half of its work."""
        if sequence.params.prompt_logprobs is not None:
            return False
        further = sequence.keys[num_shared:]
        filled = next((i for i, key in enumerate(further) if key not in budget.keys), len(further))
        size = self._blocks.block_size
        return 2 * filled * size >= sequence.num_tokens - num_shared * size

    def _take(self, sequence: Sequence, stop: int, budget: _Budget) -> Scheduled:
        self._blocks.grow(sequence, stop)
        start, sequence.num_computed = sequence.num_computed, stop
        items = self._uncached(sequence, start, stop)
        for item in items:
            budget.tower.take(item)
        budget.tokens -= stop - start
        budget.prompts |= bool(items) or stop - start > 1
        size = self._blocks.block_size
        extend_keys(sequence, size, stop)
        budget.keys.update(sequence.keys[start // size : stop // size])
        return Scheduled(sequence, start, stop)

    def _stop(self, sequence: Sequence, start: int, budget: _Budget) -> int:
        """Return the end of the range of tokens that begins at `start` and fits the budgets."""
        stop = min(sequence.num_tokens, start + max(budget.tokens, 0))
        items = self._uncached(sequence, start, stop)
        if items and (fitting := budget.tower.num_fitting(items)) < len(items):
            stop = max(items[fitting].start, start)
        for first, last in sequence.spans_in(stop - 1, stop):
            if stop < last:
                # A span cannot be cut, and may exceed every budget. The first prompt of a step may therefore exceed the
                # budgets.
                return first if first > start else start if budget.prompts else last
        return stop

    def _uncached(self, sequence: Sequence, start: int, stop: int) -> list[MediaItem]:
        return [item for item in sequence.items_in(start, stop) if item not in self._encoder_cache]

    def _let_go(self, sequence: Sequence) -> None:
        self._blocks.free(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Move a sequence to the head of the queue. Keys and values of its tokens are computed again later."""
        self._let_go(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1
