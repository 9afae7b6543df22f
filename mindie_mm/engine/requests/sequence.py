"""One request inside the engine."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter, abc
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.engine.requests.engine_messages import Timings, TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.nn.model import Positions
from mindie_mm.nn.splice import MediaItem
from mindie_mm.structured.grammar import Constraint


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, media and pages; the scheduler alone moves `num_computed` and `blocks`."""

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    """Plain ids of the prompt, then of the output."""
    num_prompt: int
    items: abc.Sequence[MediaItem]
    """Media of the prompt, in order."""
    prompt_positions: Positions
    """Where its tokens stand, those of the output too."""
    span_ids: Tensor | None
    """int64 [num_prompt]: numbers of the tokens that attend to each other both ways; None where all are causal."""
    max_tokens: int
    """Most tokens of output, from the request or from what the context holds."""
    generator: torch.Generator | None
    """Draws this sequence's tokens; None for a greedy one."""
    constraint: Constraint | None = None
    """The grammar that its tokens must fit, if any."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of the KV cache, in order."""
    media_consumed: bool = False
    """Whether the blocks of `items` may be freed, because the KV cache has taken in the features of all of them."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    num_cached: int | None = None
    """Tokens of those that were there when it was first scheduled; None before."""
    num_shareable: int = 0
    """Leading tokens whose blocks other sequences may share."""
    root_key: bytes = b""
    """The key before the first block's (`prefix.py`)."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of its first full blocks, as far as they were asked for."""
    span_keys: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Keys of what lies in each of `spans`, as far as they were asked for."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities at positions 1.. of the prompt, as far as they are computed."""
    asked_s: float = field(default_factory=time.monotonic)
    """As `Add.asked_s`."""
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    tower_s: float = 0.0
    spans: list[tuple[int, int]] = field(init=False)
    """Spans [start, stop) of the prompt that no chunk may end within, ascending: the bidirectional ones."""
    unique_prompt_ids: NDArray[np.int64] = field(init=False)
    """The different ids of the prompt, int64, ascending; none where no penalty asks for them."""
    output_counts: Counter[int] = field(init=False)
    """How often each id is in the output."""
    _item_starts: list[int] = field(init=False)
    """First slots of `items`, ascending."""
    _item_stops: list[int] = field(init=False)
    """The slots behind the last ones of each item and of those before it, ascending."""

    def __post_init__(self) -> None:
        self.spans = _spans(self.span_ids)
        penalised = self.token_ids[: self.num_prompt] if self.params.repetition_penalty != 1 else []
        self.unique_prompt_ids = np.unique(np.array(penalised, dtype=np.int64))
        self.output_counts = Counter(self.output_ids)
        self._item_starts = [item.start for item in self.items]
        self._item_stops = [*accumulate((item.stop for item in self.items), max)]

    def append(self, token: int) -> None:
        """Takes a token of the output."""
        self.token_ids.append(token)
        self.output_counts[token] += 1

    @property
    def media_stop(self) -> int:
        """The slot behind the last one of any item; 0 without media."""
        return self._item_stops[-1] if self._item_stops else 0

    def consume_media(self) -> None:
        """Let go of the mappings of the media's blocks, which may be freed from then on."""
        self.media_consumed = True
        self.items = [item.loose() for item in self.items]

    def refill(self, items: abc.Sequence[MediaItem]) -> None:
        """Take the same media from other blocks."""
        self.media_consumed = False
        self.items = items

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Tokens of output."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """The tokens drawn so far."""
        return self.token_ids[self.num_prompt :]

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Plain ids of tokens [start, stop), int64."""
        return np.array(self.token_ids[start:stop], dtype=np.int64)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions of tokens [start, stop): int64 [axes, stop - start]."""
        return self.prompt_positions.of(start, stop)

    def items_in(self, start: int, stop: int) -> list[MediaItem]:
        """The media items with slots in [start, stop)."""
        first, last = bisect_right(self._item_stops, start), bisect_left(self._item_starts, stop)
        return [item for item in self.items[first:last] if item.stop > start]

    def spans_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The `spans` that have tokens in [start, stop)."""
        first = bisect_right(self.spans, start, key=lambda span: span[1])
        return self.spans[first : bisect_left(self.spans, stop, key=lambda span: span[0])]

    def timings(self) -> Timings:
        """Where the time went, up to now."""
        now = time.monotonic()
        scheduled = self.scheduled_s or now
        first = self.first_token_s or now
        return Timings(
            queue_s=scheduled - self.asked_s,
            prefill_s=first - scheduled,
            tower_s=self.tower_s,
            decode_s=now - first,
        )


def _spans(span_ids: Tensor | None) -> list[tuple[int, int]]:
    """From the first to the last token of each bidirectional span; those that overlap are joined."""
    if span_ids is None:
        return []
    numbers, first = np.unique(span_ids.numpy(), return_index=True)
    last = len(span_ids) - np.unique(span_ids.numpy()[::-1], return_index=True)[1]
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(zip(first[numbers >= 0].tolist(), last[numbers >= 0].tolist(), strict=True)):
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return spans
