"""The scheduler, which selects the requests and tokens of the next step.

Each request has tokens that are not in the cache yet: one token for a decode, and many tokens for a prefill. The same
rule applies to both. A step contains as many tokens of each request as the step's budgets allow. Decodes are scheduled
first, then prompts that have begun, then new prompts. This is continuous batching with chunked prefill (Yu et al.,
Orca, 2022; Agrawal et al., Sarathi, 2023).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.cache.prefix import extend_keys
from mindie_mm.engine.requests.request import Request
from mindie_mm.nn.splice import ItemRef, MediaItem
from mindie_mm.settings.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens [start, stop) of a request that this step computes."""

    request: Request
    start: int
    stop: int
    samples: bool = field(init=False)
    """Whether the step reaches the end of the request. In this case the next token is drawn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.stop == self.request.num_tokens)


class BaseScheduler(ABC):
    """Queues of waiting and running requests, in first-come, first-served order within a priority."""

    def __init__(self, config: EngineConfig, encoder_cache: EncoderCache, tower_limits: TowerLimits) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
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
        """Share of the KV cache that requests use, in [0, 1]."""

    @abstractmethod
    def schedule(self, unfinished: Sequence[Scheduled] = ()) -> list[Scheduled]:
        """Return the next step. It is empty only if there is no request to run.

        Args:
            unfinished: The step before, if its tokens have not arrived yet.

        """

    @abstractmethod
    def _free(self, request: Request) -> None:
        """Reclaim the memory of a running request."""

    def coming(self) -> Iterator[MediaItem]:
        """Yield media that later steps will probably encode, in the order in which they are needed."""
        for request in self.waiting:
            if not request.media_consumed:
                yield from (item for item in request.items if item not in self._encoder_cache)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request behind the requests that are more urgent, or as urgent and were asked for earlier."""
        at = len(self.waiting)
        while at and _turn(self.waiting[at - 1]) > _turn(request):
            at -= 1
        self.waiting.insert(at, request)

    def remove(self, request: Request) -> None:
        """Remove a request that has finished, failed or been aborted, and reclaim its memory."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        else:
            self.waiting.remove(request)


def _turn(request: Request) -> tuple[int, float]:
    """Return a key that orders requests by urgency and then by age."""
    return request.params.priority, request.asked_s


@dataclass(slots=True)
class _Budget:
    tokens: int
    tower: TowerBudget
    prompts: bool = False
    """Whether the step contains part of a prompt, and not only decodes."""
    keys: set[bytes] = field(default_factory=set)
    """Keys of the blocks that this step and an unfinished step fill."""


class Scheduler(BaseScheduler):
    """A scheduler for a paged KV cache. If blocks run out, it preempts the latest of the least urgent requests.

    When a waiting request is admitted, the blocks of its prefix are looked up in the cache. Tokens of the blocks that
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

    def schedule(self, unfinished: Sequence[Scheduled] = ()) -> list[Scheduled]:
        config = self._config
        budget = _Budget(config.max_num_batched_tokens, TowerBudget(self._tower_limits))
        for earlier in unfinished:
            budget.keys.update(self._filled(earlier))
        preemptions = self.preemptions
        step = []
        # Decodes come first. Otherwise an earlier prompt could use up the budget of the step.
        for request in sorted(self.running, key=lambda one: one.num_tokens - one.num_computed > 1):
            if request not in self.running:
                continue  # preempted in favor of an earlier request
            scheduled = self._schedule(request, budget)
            if scheduled is not None:
                step.append(scheduled)
        if preemptions != self.preemptions:  # admit no request, and remove preempted requests from the step
            return [scheduled for scheduled in step if scheduled.request in self.running]
        while self.waiting and len(self.running) < config.max_num_seqs:
            scheduled = self._admit(self.waiting[0], budget)
            if scheduled is None:
                break
            self.running.append(self.waiting.popleft())
            step.append(scheduled)
        return step

    def coming(self) -> Iterator[MediaItem]:
        for request in self.running:
            if request.num_computed < request.num_prompt and not request.media_consumed:
                yield from self._uncached(request, request.num_computed, request.num_prompt)
        yield from super().coming()

    def computed(self, step: Sequence[Scheduled]) -> None:
        """Let other requests share the blocks that `step` filled. Call this before removing requests of the step."""
        size = self._blocks.block_size
        for scheduled in step:
            request = scheduled.request
            extend_keys(request, size, scheduled.stop)
            for block, key in zip(request.kv_blocks[scheduled.start // size :], self._filled(scheduled), strict=False):
                self._blocks.keep(block, key)

    def _filled(self, scheduled: Scheduled) -> list[bytes]:
        """Return the keys of the blocks that a step fills, as far as they are known."""
        size = self._blocks.block_size
        return scheduled.request.keys[scheduled.start // size : scheduled.stop // size]

    def _schedule(self, request: Request, budget: _Budget) -> Scheduled | None:
        """Schedule a running request. If blocks run out, preempt other requests first, and this request last."""
        if request.awaits_last_token:
            return None
        stop = self._stop(request, request.num_computed, budget)
        if stop == request.num_computed:
            return None
        while not self._blocks.can_grow(request, stop):
            # Preempt the latest of the least urgent requests. A request never yields to a less urgent request.
            index = max(range(len(self.running)), key=lambda one: (*_turn(self.running[one]), one))
            last = self.running.pop(index)
            self._preempt(last)
            if last is request:
                return None
        return self._take(request, stop, budget)

    def _admit(self, request: Request, budget: _Budget) -> Scheduled | None:
        extend_keys(request, self._blocks.block_size, request.num_tokens - 1)  # the last token is always computed
        shared = [] if request.params.prompt_logprobs is not None else self._blocks.find(request.keys)
        start = len(shared) * self._blocks.block_size
        if self._comes_soon(request, len(shared), budget):
            return None
        stop = self._stop(request, start, budget)
        if stop == start or not self._blocks.can_grow(request, stop, shared):
            return None
        self._blocks.share(request, shared)
        request.num_computed = start
        if request.num_cached is None:
            request.num_cached = start
            request.scheduled_s = time.monotonic()
            if request.num_shareable and request.params.prompt_logprobs is None:
                self.prefix_queries += request.num_prompt
                self.prefix_hits += start
        return self._take(request, stop, budget)

    def _comes_soon(self, request: Request, num_shared: int, budget: _Budget) -> bool:
        """Return whether this step fills blocks that would save the request at least half of its work."""
        if request.params.prompt_logprobs is not None:
            return False
        further = request.keys[num_shared:]
        filled = next((i for i, key in enumerate(further) if key not in budget.keys), len(further))
        size = self._blocks.block_size
        return 2 * filled * size >= request.num_tokens - num_shared * size

    def _take(self, request: Request, stop: int, budget: _Budget) -> Scheduled:
        self._blocks.grow(request, stop)
        start, request.num_computed = request.num_computed, stop
        items = self._uncached(request, start, stop)
        for item in items:
            budget.tower.take(item)
        budget.tokens -= stop - start
        budget.prompts |= bool(items) or stop - start > 1
        extend_keys(request, self._blocks.block_size, stop)
        scheduled = Scheduled(request, start, stop)
        budget.keys.update(self._filled(scheduled))
        return scheduled

    def _stop(self, request: Request, start: int, budget: _Budget) -> int:
        """Return the end of the range of tokens that begins at `start` and fits the budgets."""
        stop = min(request.num_tokens, start + max(budget.tokens, 0))
        items = self._uncached(request, start, stop)
        if items and (fitting := budget.tower.num_fitting(items)) < len(items):
            stop = max(items[fitting].start, start)
        for first, last in request.spans_in(stop - 1, stop):
            if stop < last:
                # A span cannot be cut, and may exceed every budget. The first prompt of a step may therefore exceed the
                # budgets.
                return first if first > start else start if budget.prompts else last
        return stop

    def _uncached(self, request: Request, start: int, stop: int) -> list[MediaItem]:
        return [item for item in request.items_in(start, stop) if item not in self._encoder_cache]

    def _free(self, request: Request) -> None:
        self._blocks.free(request)

    def _preempt(self, request: Request) -> None:
        """Put a request back into the queue, at its turn. Keys and values of its tokens are computed again later."""
        self._free(request)
        request.num_computed = 0
        at = sum(_turn(other) < _turn(request) for other in self.waiting)
        self.waiting.insert(at, request)
        self.preemptions += 1


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
