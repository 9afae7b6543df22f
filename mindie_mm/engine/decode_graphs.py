"""Decode steps that are captured once per size and then launched as a graph, such as a CUDA graph.

A decode step launches about a dozen operators per layer. The host needs more time to launch them than the GPU needs to
run them. All inputs of a graph are in one tensor, which is written before each launch. Sizes are powers of two, so that
there are few graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import Device, block_table, kind_of, upload
from mindie_mm.engine.draws import Draws
from mindie_mm.engine.ranks import Ranks
from mindie_mm.engine.scheduler import Scheduled
from mindie_mm.nn.model import Model
from mindie_mm.nn.paged_batch import GraphBatch, PagedCache
from mindie_mm.settings.config import EngineConfig

_log = logging.getLogger(__name__)

MOST_SLOTS = 2**16
"""Maximum number of KV cache tokens that a captured graph gathers, including padding. In larger steps, launches do not
dominate the time, but padding to the longest request may."""


def captures_graphs(device: type[Device], config: EngineConfig, ranks: Ranks) -> bool:
    """Return whether an engine with these settings captures its decode steps as graphs."""
    # With several ranks, if one rank failed to capture a graph, the others would wait for it forever.
    return device.records and ranks.count == 1 and not config.enforce_eager


def most_rows(max_num_seqs: int, block_size: int) -> int:
    """Return the maximum number of rows of a captured graph."""
    return max(1, min(_power(max_num_seqs), MOST_SLOTS // block_size))


def most_blocks(num_rows: int, num_tokens: int, block_size: int) -> int:
    """Return the maximum number of KV blocks per row of a graph, for requests of up to `num_tokens` tokens."""
    return max(1, min(_power(-(-num_tokens // block_size)), MOST_SLOTS // (num_rows * block_size)))


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: Tensor
    """Inputs, int64 [n], in the layout of `_inputs`."""
    launch: Callable[[], object]


class DecodeGraphs:
    """The captured graphs of one model's decode steps over one KV cache."""

    def __init__(self, model: Model, cache: PagedCache, max_num_seqs: int) -> None:
        spec = model.spec
        self._model = model
        self._cache = cache
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """Graphs by number of rows and number of KV blocks per row."""
        self._most_slots = MOST_SLOTS
        """Current limit, at most MOST_SLOTS. It is halved when a capture runs out of memory, and set to 0 after any
        other failure."""
        num_rows = most_rows(max_num_seqs, cache.block_size)
        self._logits = torch.empty(num_rows, spec.vocab_size, dtype=torch.float32, device=spec.device)

    def logits(self, step: Sequence[Scheduled], earlier: Draws | None = None) -> Tensor | None:
        """Run a step as a graph and return its logits, float32 [requests, vocabulary]. The next step overwrites them.

        `earlier` are the tokens of the step before, if they have not arrived on the host yet.

        Return None if the step cannot run as a graph, because it contains part of a prompt, its requests are too long,
        or its capture fails.
        """
        if not self._most_slots or not all(_is_decode(scheduled) for scheduled in step):
            return None
        size = self._cache.block_size
        rows, blocks = _power(len(step)), _power(max(-(-scheduled.stop // size) for scheduled in step))
        if rows * blocks * size > self._most_slots:
            return None
        # Fill surplus rows with copies of the last request. They write the same values again.
        padded = [*step, *[step[-1]] * (rows - len(step))]
        inputs = upload(_inputs(padded, blocks, self._cache), self._logits.device)
        if earlier is not None:
            earlier.write(inputs, padded)
        if graph := self._graphs.get((rows, blocks)):
            graph.inputs.copy_(inputs)
        elif graph := self._capture(inputs, rows, blocks):
            self._graphs[rows, blocks] = graph
        else:
            return None
        graph.launch()
        return self._logits[: len(step)]

    def _capture(self, inputs: Tensor, rows: int, blocks: int) -> _Graph | None:
        ids, slots, lengths = inputs[: 3 * rows].view(3, rows)
        table, positions = inputs[3 * rows :].split([rows * blocks, len(inputs) - rows * (3 + blocks)])

        def decode() -> None:
            batch = GraphBatch(self._cache, slots, table.view(rows, blocks), lengths)
            states = self._model.states(ids, positions.view(-1, rows), (), batch, None)
            self._logits[:rows] = self._model.head(states)

        try:
            return _Graph(inputs, kind_of(inputs.device).record(decode))
        except RuntimeError as error:
            # Only the capture has failed. The step is computed again, operator by operator. If there are two errors,
            # the first error is the cause, and the second error only reports that the capture is invalid.
            why = error.__context__ or error
            slots, which = rows * blocks * self._cache.block_size, ""
            if isinstance(why, torch.OutOfMemoryError):  # the limit is halved, so this can happen only a few times
                which = f" that gather {slots} tokens or more"
            self._most_slots = slots // 2 if which else 0
            _log.warning(
                "decode steps%s cannot be recorded as graphs, so each operator is launched separately: %s", which, why
            )
            self._graphs.clear()  # the step needs their memory. Smaller graphs are captured again
            return None


def _is_decode(scheduled: Scheduled) -> bool:
    """Return whether the step computes exactly one token of the request, and this token is an output token."""
    return (
        scheduled.samples and scheduled.stop - scheduled.start == 1 and scheduled.start >= scheduled.request.num_prompt
    )


def _inputs(step: Sequence[Scheduled], blocks: int, cache: PagedCache) -> NDArray[np.int64]:
    """Return the inputs of a graph, int64 [n].

    The inputs are the ids, KV cache positions and lengths of all requests, then the table of KV blocks, and then the
    positions, axis by axis.
    """
    size = cache.block_size
    held = [s.request.kv_blocks[: -(-s.stop // size)] for s in step]
    table = block_table(held, cache.padding)
    return np.concatenate(
        [
            *[s.request.ids(s.start, s.stop) for s in step],
            [own[-1] * size + s.start % size for own, s in zip(held, step, strict=True)],
            [s.stop for s in step],
            np.pad(table, ((0, 0), (0, blocks - table.shape[1])), constant_values=cache.padding).ravel(),
            np.concatenate([s.request.positions(s.start, s.stop) for s in step], axis=1).ravel(),
        ]
    )


def _power(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
