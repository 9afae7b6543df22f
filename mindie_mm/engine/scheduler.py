"""The scheduler, which selects the requests and tokens of the next step.

Each request has tokens that are not in the cache yet: one token for a decode, and many tokens for a prefill. The same
rule applies to both. A step contains as many tokens of each request as the step's budgets allow. Decodes are scheduled
first, then prompts that have begun, then new prompts. This is continuous batching with chunked prefill (Yu et al.,
Orca, 2022; Agrawal et al., Sarathi, 2023).
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.cache.prefix import extend_keys
from mindie_mm.engine.cache.state_pool import StatePool
from mindie_mm.engine.prompt_lookup import PromptLookup
from mindie_mm.engine.requests.request import Request
from mindie_mm.nn.lora.adapter import Adapter
from mindie_mm.nn.splice import ItemKey, MediaItem
from mindie_mm.settings.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens [start, stop) of a request that this step computes."""

    request: Request
    start: int
    stop: int
    reads: int = 0
    """Slot with the states of recurrent layers after `start` tokens."""
    writes: int = 0
    """Slot for the states after `stop` tokens."""
    guesses: tuple[int, ...] = ()
    """Guesses of the tokens after `stop`, which this step computes, too. A guess that is drawn need not be computed in
    another step."""
    ends: bool = field(init=False)
    """True if the step reaches the end of the request."""
    samples: bool = field(init=False)
    """True if the next token is drawn. This is so at the end of every request that does not pool its states."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", self.stop == self.request.num_tokens)
        object.__setattr__(self, "samples", self.ends and self.request.params.pooling is None)

    @property
    def pooled(self) -> range:
        """Tokens of the step whose hidden states are pooled."""
        match self.request.params.pooling:
            case "last":
                return range(self.stop - self.ends, self.stop)
            case "cls":
                return range(self.start, 1)
            case "mean":  # a preempted request computes some tokens again
                return range(max(self.start, self.request.num_pooled), self.stop)
        return range(0)

    @property
    def end(self) -> int:
        """Index after the last token that the step computes."""
        return self.stop + len(self.guesses)

    def ids(self) -> NDArray[np.int64]:
        """Return the ids of the tokens that the step computes, int64 [end - start]. The id of an awaited token is 0."""
        known = self.request.ids(self.start, self.stop)
        return np.append(known, self.guesses) if self.guesses else known


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
        self.drafts = 0
        """Number of times that a step computed guesses of a request."""
        self.draft_tokens = 0
        """Number of guesses."""
        self.accepted_tokens = 0
        """Number of guesses that were drawn."""
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
    """True if the step contains part of a prompt, and not only decodes."""
    keys: set[bytes] = field(default_factory=set)
    """Keys of the blocks after which another request can continue when this step and an unfinished step are over."""


class Scheduler(BaseScheduler):
    """A scheduler for a paged KV cache. If blocks run out, it preempts the latest of the least urgent requests.

    It also preempts a request if a more urgent one could not begin otherwise.

    When a waiting request is admitted, the blocks of its prefix are looked up in the cache. Tokens of the blocks that
    are found count as computed. If the model has recurrent layers, the request also needs a snapshot of their states.
    A prefill therefore pauses at the end of its last full block, and leaves a snapshot. It also pauses at the end of
    the blocks that it shares if the last snapshot is in their first half, because more requests may begin with them.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockPool,
        encoder_cache: EncoderCache,
        tower_limits: TowerLimits,
        states: StatePool | None = None,
        most_guesses: int = 0,
        cheap_rows: int = 0,
    ) -> None:
        """Create an empty scheduler.

        Args:
            config: Settings of the engine.
            blocks: The KV blocks.
            encoder_cache: The features of media.
            tower_limits: Limits of one call to a tower.
            states: Slots for the states of recurrent layers. None if the model has no such layers.
            most_guesses: Maximum number of guesses of a request in one step.
            cheap_rows: Maximum number of tokens in a decode step that contains guesses.

        """
        super().__init__(config, encoder_cache, tower_limits)
        self._blocks = blocks
        self._states = states
        self._most_guesses = most_guesses
        self._cheap_rows = cheap_rows
        self._read: list[int] = []
        """Slots that the step reads and nobody writes. They are held until the step has been launched."""

    @property
    def usage(self) -> float:
        return self._blocks.usage

    def schedule(self, unfinished: Sequence[Scheduled] = ()) -> list[Scheduled]:
        config = self._config
        if self._read:
            self._free_read()
        budget = _Budget(config.max_num_batched_tokens, TowerBudget(self._tower_limits))
        for earlier in unfinished:
            budget.keys.update(self._continued_after(earlier))
        self._yield_to_more_urgent()
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
        step += self._admit_waiting(budget)
        return step

    def _admit_waiting(self, budget: _Budget) -> list[Scheduled]:
        """Admit waiting requests in their order.

        A request whose LoRA adapter has no place on the device waits until a running adapter has no more requests.
        Later requests with adapters then wait, too, so that it gets the place. Requests without adapters need not wait.
        """
        admitted: list[Scheduled] = []
        index, lacks_place = 0, False
        while index < len(self.waiting) and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[index]
            if request.adapter is not None:
                lacks_place = lacks_place or not self._has_place(request.adapter)
                if lacks_place:
                    index += 1
                    continue
            scheduled = self._admit(request, budget)
            if scheduled is None:
                break
            del self.waiting[index]
            self.running.append(request)
            admitted.append(scheduled)
        return admitted

    def _has_place(self, adapter: Adapter) -> bool:
        """Return whether an adapter can be on the device together with the adapters of the running requests."""
        used = {request.adapter for request in self.running if request.adapter is not None}
        return adapter in used or len(used) < self._config.max_loras

    def _yield_to_more_urgent(self) -> None:
        """Preempt less urgent requests until the most urgent waiting request has a place, and blocks to begin.

        Do nothing if its LoRA adapter has no place on the device, because it could not begin in the room of others.
        """
        while self.waiting and self.running:
            first = self.waiting[0]
            last = max(self.running, key=_turn)
            begins = min(first.num_tokens, self._config.max_num_batched_tokens)
            has_room = len(self.running) < self._config.max_num_seqs and self._blocks.can_grow(first, begins)
            lacks_place = first.adapter is not None and not self._has_place(first.adapter)
            if has_room or lacks_place or last.params.priority <= first.params.priority:
                return
            self.running.remove(last)
            self._preempt(last)

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
            if self._states is not None and (slot := request.snapshots.pop(scheduled.stop, None)) is not None:
                self._states.keep(slot, request.keys[scheduled.stop // size - 1])
                self._states.free(slot)

    def accept(self, request: Request) -> Scheduled:
        """Count a guess that was drawn as computed. Return it as a decode."""
        self.accepted_tokens += 1
        request.num_computed += 1
        return Scheduled(request, request.num_computed - 1, request.num_computed)

    def forget(self, request: Request) -> None:
        """Do not share the blocks and snapshots of `request` any longer, because they may contain non-finite values."""
        self._blocks.forget(self._blocks.find(request.keys))
        if self._states is not None:
            self._states.forget(request.keys)

    def _filled(self, scheduled: Scheduled) -> list[bytes]:
        """Return the keys of the blocks that a step fills, as far as they are known."""
        size = self._blocks.block_size
        return scheduled.request.keys[scheduled.start // size : scheduled.stop // size]

    def _continued_after(self, scheduled: Scheduled) -> list[bytes]:
        """Return the keys of the blocks after which another request can continue when the step is over."""
        if self._states is None:
            return self._filled(scheduled)
        return self._filled(scheduled)[-1:] if scheduled.stop in scheduled.request.snapshots else []

    def _schedule(self, request: Request, budget: _Budget) -> Scheduled | None:
        """Schedule a running request. If blocks run out, preempt other requests first, and this request last."""
        if request.awaits_last_token:
            return None
        if request.lengthen():
            self.running.remove(request)
            self._preempt(request)  # the keys in the cache depend on the positions
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
        return self._take(request, stop, budget, self._guesses(request, budget))

    def _guesses(self, request: Request, budget: _Budget) -> tuple[int, ...]:
        """Return guesses of the tokens after the next one, if the request is decoded and there is room for them.

        All running requests get the same share of the rows. A guess never takes a block that another request needs.
        """
        num_tokens = request.num_tokens
        if not self._most_guesses or request.num_computed + 1 < num_tokens or request.num_computed < request.num_prompt:
            return ()
        positions = request.prompt_positions
        most = min(
            self._most_guesses,
            self._cheap_rows // len(self.running) - 1,
            budget.tokens - 1,
            request.max_tokens - request.num_output - 1,
            sys.maxsize if positions.longer is None else positions.most_tokens - num_tokens,
        )
        if most <= 0:
            return ()
        if request.lookup is None:
            request.lookup = PromptLookup()
        guesses = request.lookup.guess(request.token_ids, most)
        if not guesses or not self._blocks.can_grow(request, num_tokens + len(guesses), spare=len(self.running)):
            return ()
        self.drafts += 1
        self.draft_tokens += len(guesses)
        return guesses

    def _admit(self, request: Request, budget: _Budget) -> Scheduled | None:
        request.lengthen()
        extend_keys(request, self._blocks.block_size, request.num_tokens - 1)  # the last token is always computed
        shared = [] if request.params.needs_whole_prompt else self._blocks.find(request.keys)
        if self._states is not None:
            found = self._states.find(request.keys[: len(shared)])
            request.pause = len(shared) * self._blocks.block_size if 2 * found < len(shared) else 0
            shared = shared[:found]
        start = len(shared) * self._blocks.block_size
        if self._comes_soon(request, len(shared), budget):
            return None
        stop = self._stop(request, start, budget)
        if stop == start or not self._blocks.can_grow(request, stop, shared):
            return None
        if self._states is not None and not self._begin_state(request, len(shared), self._states):
            return None
        self._blocks.share(request, shared)
        request.num_computed = start
        if request.num_cached is None:
            request.num_cached = start
            request.scheduled_s = time.monotonic()
            if request.num_shareable and not request.params.needs_whole_prompt:
                self.prefix_queries += request.num_prompt
                self.prefix_hits += start
        return self._take(request, stop, budget)

    def _comes_soon(self, request: Request, num_shared: int, budget: _Budget) -> bool:
        """Return whether this step fills blocks that would save the request at least half of its work."""
        if request.params.needs_whole_prompt:
            return False
        further = request.keys[num_shared:]
        if self._states is None:
            filled = next((i for i, key in enumerate(further) if key not in budget.keys), len(further))
        else:
            filled = max((i + 1 for i, key in enumerate(further) if key in budget.keys), default=0)
        size = self._blocks.block_size
        return 2 * filled * size >= request.num_tokens - num_shared * size

    def _take(self, request: Request, stop: int, budget: _Budget, guesses: tuple[int, ...] = ()) -> Scheduled:
        self._blocks.grow(request, stop + len(guesses))
        start, request.num_computed = request.num_computed, stop
        items = self._uncached(request, start, stop)
        for item in items:
            budget.tower.take(item)
        budget.tokens -= stop - start + len(guesses)
        budget.prompts |= bool(items) or stop - start > 1
        extend_keys(request, self._blocks.block_size, stop)
        slots = (0, 0) if self._states is None else self._move_state(request, start, stop, self._states)
        scheduled = Scheduled(request, start, stop, *slots, guesses)
        budget.keys.update(self._continued_after(scheduled))
        return scheduled

    def _stop(self, request: Request, start: int, budget: _Budget) -> int:
        """Return the end of the range of tokens that begins at `start` and fits the budgets."""
        stop = min(request.num_tokens, start + max(budget.tokens, 0))
        items = self._uncached(request, start, stop)
        if items and (fitting := budget.tower.num_fitting(items)) < len(items):
            stop = max(items[fitting].start, start)
        if self._states is not None:
            # The last token is never shared, so that no other request needs the states after it.
            boundary = min(stop, request.num_tokens - 1, request.num_shareable)
            boundary -= boundary % self._blocks.block_size
            if start < request.pause < boundary:
                boundary = request.pause
            stop = boundary if start < boundary else stop
        for first, last in request.spans_in(stop - 1, stop):
            if stop < last:
                # A span cannot be cut, and may exceed every budget. The first prompt of a step may therefore exceed the
                # budgets.
                return first if first > start else start if budget.prompts else last
        return stop

    def _begin_state(self, request: Request, num_shared: int, states: StatePool) -> bool:
        """Give a new request an empty slot, or the slot of the state that it continues.

        Return False if there is no slot to write.
        """
        if not num_shared:
            request.state_slot = states.allocate()
            return request.state_slot is not None
        slot = states.use(request.keys[num_shared - 1])
        if not states.can_continue(slot):
            return False
        states.hold(slot)
        request.state_slot = slot
        return True

    def _move_state(self, request: Request, start: int, stop: int, states: StatePool) -> tuple[int, int]:
        """Return the slots that the step reads and writes. Do not overwrite a snapshot if another slot is free."""
        reads = request.state_slot
        assert reads is not None
        writes = reads
        key = states.key_of(reads)
        if key is not None or start in request.snapshots:
            if (free := states.allocate()) is not None:
                writes = free
                self._read.append(reads)
            elif key is not None:
                states.forget([key])
            else:
                states.free(request.snapshots.pop(start))
        request.state_slot = writes
        size = self._blocks.block_size
        if stop % size == 0 and stop < request.num_tokens and stop // size <= len(request.keys):
            states.hold(writes)
            request.snapshots[stop] = writes
        return reads, writes

    def _free_read(self) -> None:
        for slot in self._read:
            assert self._states is not None
            self._states.free(slot)
        self._read.clear()

    def _uncached(self, request: Request, start: int, stop: int) -> list[MediaItem]:
        return [item for item in request.items_in(start, stop) if item not in self._encoder_cache]

    def _free(self, request: Request) -> None:
        self._blocks.free(request)
        if self._states is not None and request.state_slot is not None:
            for slot in (request.state_slot, *request.snapshots.values()):
                self._states.free(slot)
            request.state_slot = None
            request.snapshots.clear()

    def _preempt(self, request: Request) -> None:
        """Put a request back into the queue, at its turn. Keys and values of its tokens are computed again later."""
        self._free(request)
        request.num_computed = 0
        at = sum(_turn(other) < _turn(request) for other in self.waiting)
        self.waiting.insert(at, request)
        self.preemptions += 1


@dataclass(frozen=True, slots=True)
class TowerLimits:
    """Limits of one call to a tower. A single item that exceeds the limits is still accepted."""

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
        self._items: set[ItemKey] = set()

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
