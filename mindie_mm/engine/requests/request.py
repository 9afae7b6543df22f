"""The state of one request inside the engine."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.engine.prompt_lookup import PromptLookup
from mindie_mm.engine.requests.engine_messages import Origin, Timings, TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.nn.lora.adapter import Adapter
from mindie_mm.nn.model import Positions
from mindie_mm.nn.splice import MediaItem
from mindie_mm.structured.grammar import Constraint


@dataclass(slots=True, eq=False)
class Request:
    """Tokens, media and KV blocks of a request. Only the scheduler changes `num_computed` and `kv_blocks`."""

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    """Ids of the prompt, with placeholder ids in place of handle words, followed by the output."""
    num_prompt: int
    items: Sequence[MediaItem]
    """Media of the prompt, in order."""
    prompt_positions: Positions
    """Positions of the prompt's tokens. They also determine the positions of the output."""
    span_ids: Tensor | None
    """Span id of each prompt token, int64 [num_prompt]. Tokens with the same id attend to each other in both
    directions. Tokens with a negative id are not in a span. None means that attention is causal everywhere."""
    max_tokens: int
    """Maximum number of output tokens, from the request or from the context length."""
    generator: torch.Generator | None
    """Random generator of this request, or None if sampling is greedy."""
    adapter: Adapter | None = None
    """LoRA adapter that computes the request, or None."""
    origin: Origin | None = None
    """See `Progress.origin`."""
    constraint: Constraint | None = None
    """Constraint on the output, if the request asks for a structured output."""
    kv_blocks: list[int] = field(default_factory=list)
    """KV blocks of the request, in order."""
    state_slot: int | None = None
    """Slot with the states of recurrent layers after `num_computed` tokens."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """Slots with the states after some numbers of tokens, as far as the steps that write them have not finished."""
    pause: int = 0
    """Number of tokens after which the prefill pauses, so that it leaves a snapshot of the states. 0 if it need not."""
    media_consumed: bool = False
    """True if the shared-memory blocks of `items` may be freed, because the KV cache covers all features."""
    num_computed: int = 0
    """Number of tokens whose keys and values are in the KV cache."""
    lookup: PromptLookup | None = None
    """The n-grams of the tokens, if the engine has looked for guesses."""
    awaits_token: bool = False
    """True if a step has drawn the next token, which has not arrived on the host yet."""
    num_cached: int | None = None
    """Number of tokens that were in the prefix cache when the request was first scheduled, or None before that."""
    num_shareable: int = 0
    """Number of leading tokens whose KV blocks other requests may share."""
    root_key: bytes = b""
    """Key that precedes the key of the first block (`prefix.py`)."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of the first full KV blocks, as far as they have been computed."""
    span_keys: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Hashes of the content of `spans`, as far as they have been computed."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities at positions 1.. of the prompt, as far as they have been computed."""
    pooled: Tensor | None = None
    """Sum of the hidden states of the first `num_pooled` tokens, float32 [hidden], or the single state to return."""
    num_pooled: int = 0
    asked_s: float = field(default_factory=time.monotonic)
    """See `Add.asked_s`."""
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    tower_s: float = 0.0
    spans: list[tuple[int, int]] = field(init=False)
    """Bidirectional spans [start, stop) of the prompt, ascending. No chunk may end within a span."""
    unique_prompt_ids: NDArray[np.int64] = field(init=False)
    """Distinct ids of the prompt, int64, ascending. Empty if there is no repetition penalty."""
    output_counts: Counter[int] = field(init=False)
    """Number of occurrences of each id in the output."""
    _refused: NDArray[np.bool_] | None = field(init=False, default=None)
    _item_starts: list[int] = field(init=False)
    """Position of the first placeholder of each item, ascending."""
    _item_stops: list[int] = field(init=False)
    """For each item, the index after the last placeholder of this item and all earlier items, ascending."""

    def __post_init__(self) -> None:
        self.spans = _spans(self.span_ids)
        penalised = self.token_ids[: self.num_prompt] if self.params.repetition_penalty != 1 else []
        self.unique_prompt_ids = np.unique(np.array(penalised, dtype=np.int64))
        self.output_counts = Counter(self.output_ids)
        self._item_starts = [item.start for item in self.items]
        self._item_stops = [*accumulate((item.stop for item in self.items), max)]

    def append(self, token: int) -> None:
        """Append an output token."""
        self.token_ids.append(token)
        self.output_counts[token] += 1

    def content_digest(self) -> bytes:
        """Return a digest of the prompt's ids and media. It does not depend on the blocks that contain the media."""
        digest = blake3(self.ids(0, self.num_prompt).tobytes())
        for item in self.items:
            digest.update(np.array(item.shape.values).tobytes() + (item.digest or b""))
        return digest.digest(16)

    def pool(self, states: Tensor) -> None:
        """Add the next hidden states, [rows, hidden], to `pooled`."""
        total = states.sum(0, dtype=torch.float32)
        self.pooled = total if self.pooled is None else self.pooled + total
        self.num_pooled += len(states)

    @property
    def tower_adapter(self) -> Adapter | None:
        """The LoRA adapter of the request, if it changes the features of media."""
        return self.adapter if self.adapter is not None and self.adapter.in_tower else None

    @property
    def media_stop(self) -> int:
        """Index after the last placeholder of all items, or 0 if there are no media."""
        return self._item_stops[-1] if self._item_stops else 0

    def consume_media(self) -> None:
        """Unmap the media's blocks. The blocks may be freed afterwards."""
        self.media_consumed = True
        for item in self.items:
            item.close()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output, including a token that has not arrived yet."""
        return len(self.token_ids) + self.awaits_token

    @property
    def awaits_last_token(self) -> bool:
        """True if the output will have `max_tokens` tokens when the next token arrives."""
        return self.awaits_token and self.num_output + 1 >= self.max_tokens

    @property
    def num_output(self) -> int:
        """Number of output tokens that have arrived."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """Output tokens so far."""
        return self.token_ids[self.num_prompt :]

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the ids of tokens [start, stop), int64, without handle words. The id of an awaited token is 0."""
        awaited = [0] * (stop - len(self.token_ids))
        return np.array([*self.token_ids[start:stop], *awaited], dtype=np.int64)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions of tokens [start, stop), int64 [axes, stop - start]."""
        return self.prompt_positions.of(start, stop)

    def lengthen(self) -> bool:
        """Replace the positions of all tokens if there are too many tokens for them. Return whether this was so."""
        positions = self.prompt_positions
        if positions.longer is None or self.num_tokens <= positions.most_tokens:
            return False
        self.prompt_positions = positions.longer
        self.keys.clear()  # they depend on the positions
        return True

    def refused(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return which ids are not among `allowed_token_ids`, bool [vocab_size]."""
        if self._refused is None:
            self._refused = np.ones(vocab_size, np.bool_)
            self._refused[list(self.params.allowed_token_ids or range(vocab_size))] = False
        return self._refused

    def items_in(self, start: int, stop: int) -> list[MediaItem]:
        """Return the media items with placeholders in [start, stop)."""
        first, last = bisect_right(self._item_stops, start), bisect_left(self._item_starts, stop)
        return [item for item in self.items[first:last] if item.stop > start]

    def spans_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the `spans` that have tokens in [start, stop)."""
        first = bisect_right(self.spans, start, key=lambda span: span[1])
        return self.spans[first : bisect_left(self.spans, stop, key=lambda span: span[0])]

    def timings(self) -> Timings:
        """Return the time spent in each stage so far."""
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
    """Return the bidirectional spans as [start, stop). Overlapping spans are merged."""
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
