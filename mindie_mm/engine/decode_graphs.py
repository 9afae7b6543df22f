"""Decode steps that are captured once per size and then launched as a graph, such as a CUDA graph.

A decode step launches about a dozen operators per layer. The host needs more time to launch them than the device needs
to run them. All inputs of a graph are in one tensor, which is written before each launch. Sizes are powers of two, so
that there are few graphs. The first launch of each graph is compared with the same step without a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import Device, block_table, kernels_of, kind_of, overwrite, upload
from mindie_mm.engine.draws import Draws
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.engine.scheduler import Scheduled
from mindie_mm.errors import DeviceError
from mindie_mm.nn.model import Model
from mindie_mm.nn.paged_batch import GraphBatch
from mindie_mm.nn.paged_cache import KVLayer, PagedCache
from mindie_mm.settings.config import EngineConfig

_log = logging.getLogger(__name__)

MOST_SLOTS = 2**16
"""Maximum number of KV cache tokens that a captured graph gathers, including padding. In larger steps, launches do not
dominate the time, but padding to the longest request may. Fused attention gathers nothing and has no such limit."""
_NO_LIMIT = 2**62
_FIRST_TOKENS = 2**13
"""Initial length of requests in tokens that the table of KV blocks of a graph with fused attention can hold."""
_TOLERANCE = 0.05
"""Largest accepted difference between the logits of a step with and without a graph, relative to the largest logit."""


def captures_graphs(device: type[Device], config: EngineConfig) -> bool:
    """Return whether an engine with these settings captures its decode steps as graphs.

    Raise DeviceError if the environment does not allow it.
    """
    if not device.records or config.enforce_eager:
        return False
    if (reason := device.why_not_record()) is not None:
        raise DeviceError(reason)
    return True


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
    launch: Callable[[Sequence[int]], object]


@dataclass(slots=True)
class _Decode:
    """A decode step that is computed operator by operator, with inputs and outputs in fixed memory."""

    model: Model
    cache: PagedCache
    inputs: Tensor
    """Inputs, int64 [n], in the layout of `_inputs`."""
    rows: int
    blocks: int
    """Number of KV blocks per row."""
    lengths: Sequence[int]
    """Number of tokens of each request, including the new token."""
    logits: Tensor
    """float32 [rows or more, vocabulary]."""
    gathers: bool = False
    """True if a layer has gathered the KV blocks."""
    has_run: bool = False

    @property
    def num_slots(self) -> int:
        return self.rows * self.blocks * self.cache.block_size

    def __call__(self) -> None:
        rows, blocks = self.rows, self.blocks
        heads = self.inputs[: 5 * rows].view(5, rows)
        ids, slots, lengths = heads[:3]
        table, positions = self.inputs[5 * rows :].split([rows * blocks, len(self.inputs) - rows * (5 + blocks)])
        # Capture other lengths, so that the first launch shows whether it replaces them.
        host_lengths = [blocks * self.cache.block_size] * rows if self.has_run else self.lengths
        batch = GraphBatch(self.cache, slots, table.view(rows, blocks), lengths, host_lengths, heads[3:])
        states = self.model.states(ids, positions.view(-1, rows), (), batch, None)
        self.logits[:rows] = self.model.head(states)
        self.gathers, self.has_run = batch.gathers, True


class DecodeGraphs:
    """The captured graphs of one model's decode steps over one KV cache."""

    def __init__(self, model: Model, cache: PagedCache, max_num_seqs: int, ranks: Ranks = ALONE) -> None:
        spec = model.spec
        self._model = model
        self._cache = cache
        self._ranks = ranks
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """Graphs by number of rows and number of KV blocks per row."""
        # Beyond the first chunk of a layer, a step gathers KV blocks. The step that finds this out may be before it.
        has_chunks = any(isinstance(layer, KVLayer) and layer.chunk_size is not None for layer in spec.layers)
        self._gathers: bool | None = None if kernels_of(spec.device).attends_in_graphs and not has_chunks else True
        """True if attention gathers all KV blocks of the table. None before the first step."""
        self._most_slots = MOST_SLOTS
        """Current limit, the same on all ranks. It is halved when a capture runs out of memory, and set to 0 after any
        other failure."""
        self._blocks = 1
        """Number of KV blocks per row with fused attention. It only grows, because unused blocks take no time."""
        num_rows = most_rows(max_num_seqs, cache.block_size)
        self._logits = torch.empty(num_rows, spec.vocab_size, dtype=torch.float32, device=spec.device)

    def logits(self, step: Sequence[Scheduled], earlier: Draws | None, begun: Sequence[int]) -> Tensor | None:
        """Run a step as a graph and return its logits, float32 [requests, vocabulary]. The next step overwrites them.

        `earlier` are the tokens of the previous step, if they have not arrived on the host yet. `begun` are the KV
        blocks that must be cleared first.

        Return None if the step cannot run as a graph, because it contains part of a prompt, its requests are too long,
        or its capture fails.
        """
        if not self._most_slots or not all(_is_decode(scheduled) for scheduled in step):
            return None
        size, rows = self._cache.block_size, _power(len(step))
        needed = _power(max(-(-scheduled.stop // size) for scheduled in step))
        if begun:
            self._cache.clear(upload(np.array(begun, np.int64), self._logits.device))
        if self._gathers is None:
            self._learn(step[:1])
        if not self._gathers and needed > self._blocks:
            self._blocks = max(needed, _FIRST_TOKENS // size)
            self._graphs.clear()
        blocks = needed if self._gathers else self._blocks
        if rows > len(self._logits) or rows * blocks * size > self._most_slots:
            return None
        inputs = _inputs(step, rows, blocks, self._cache)
        launch = self._launch if (rows, blocks) in self._graphs else self._capture_and_launch
        return self._logits[: len(step)] if launch(rows, blocks, inputs, step, earlier) else None

    def _launch(
        self, rows: int, blocks: int, inputs: NDArray[np.int64], step: Sequence[Scheduled], earlier: Draws | None
    ) -> bool:
        """Launch the graph of this size, and return True."""
        graph = self._graphs[rows, blocks]
        overwrite(graph.inputs, inputs)
        if earlier is not None:
            earlier.write(graph.inputs, step)
        graph.launch(_lengths(inputs, rows))
        return True

    def _capture_and_launch(
        self, rows: int, blocks: int, inputs: NDArray[np.int64], step: Sequence[Scheduled], earlier: Draws | None
    ) -> bool:
        """Capture and launch a graph of this size. Return False if its capture fails."""
        trial = self._trial_inputs(inputs, rows)
        if earlier is not None:
            earlier.write(trial, step)
        graph = self._capture(self._decode(trial, rows, blocks, _lengths(inputs, rows)), len(step))
        if graph is None:
            return False
        self._graphs[rows, blocks] = graph
        # The capture has launched the graph, but has written states to the scratch slot.
        return not self._cache.states or self._launch(rows, blocks, inputs, step, earlier)

    def _trial_inputs(self, inputs: NDArray[np.int64], rows: int) -> Tensor:
        """Return inputs for a step that can be repeated, because it does not overwrite the states that it reads."""
        trial = inputs.copy()
        trial[4 * rows : 5 * rows] = self._cache.scratch_slot
        return upload(trial, self._logits.device)

    def _learn(self, step: Sequence[Scheduled]) -> None:
        """Find out by a step of one row whether attention gathers KV blocks.

        The ranks must agree, so that they capture the same sizes.
        """
        blocks = -(-step[0].stop // self._cache.block_size)
        inputs = _inputs(step, 1, blocks, self._cache)
        decode = self._decode(self._trial_inputs(inputs, 1), 1, blocks, _lengths(inputs, 1))
        decode()
        self._gathers = not self._ranks.all_reduce_min(not decode.gathers)
        self._most_slots = MOST_SLOTS if self._gathers else _NO_LIMIT

    def _decode(self, inputs: Tensor, rows: int, blocks: int, lengths: Sequence[int]) -> _Decode:
        return _Decode(self._model, self._cache, inputs, rows, blocks, lengths, self._logits)

    def _capture(self, decode: _Decode, num_requests: int) -> _Graph | None:
        """Capture a step, launch the graph, and compare its logits with those of the same step without a graph.

        All ranks keep the graph, or none. A rank that launched it alone would wait for the other ranks forever.
        """
        limit, why = self._most_slots, "it fails on another rank"
        try:
            graph = _Graph(decode.inputs, kind_of(decode.inputs.device).record(decode))
        except RuntimeError as error:
            if not decode.has_run and self._ranks.count > 1:
                raise  # other ranks may wait inside a collective operation, as in any other step
            # Only the capture has failed. The step is computed again, operator by operator. If there are two errors,
            # the first error is the cause, and the second error only reports that the capture is invalid.
            cause = error.__context__ or error
            why, limit = str(cause), 0
            if isinstance(cause, torch.OutOfMemoryError):  # the limit is halved, so this can happen only a few times
                limit = decode.num_slots // 2
        agreed = self._ranks.all_reduce_min(limit)
        if agreed == self._most_slots:
            difference = self._difference(graph, decode.lengths, num_requests)
            if not difference <= _TOLERANCE:
                why = f"their logits differ by {difference:.2g} of the largest logit; the limit is {_TOLERANCE}"
                limit = 0
            agreed = self._ranks.all_reduce_min(limit)
            if agreed == self._most_slots:
                return graph
        self._most_slots = agreed
        which = f" of {decode.num_slots} KV cache slots or more" if agreed else ""
        _log.warning(
            "decode steps%s cannot be recorded as graphs, so each operator is launched separately: %s", which, why
        )
        self._graphs.clear()  # the step needs their memory. Smaller graphs are captured again
        return None

    def _difference(self, graph: _Graph, lengths: Sequence[int], num_requests: int) -> float:
        """Launch a new graph. Return the largest change of a logit, relative to the largest logit."""
        actual = self._logits[:num_requests]
        expected = actual.clone()
        actual.zero_()  # a launch that computes nothing must not pass
        graph.launch(lengths)
        changes = [(a.nan_to_num() - b.nan_to_num()).abs().amax() for a, b in zip(actual, expected, strict=True)]
        return float(torch.stack(changes).amax() / expected.nan_to_num().abs().amax().clamp(min=1e-6))


def _is_decode(scheduled: Scheduled) -> bool:
    """Return whether the step computes exactly one token of the request, and this token is an output token."""
    return (
        scheduled.samples and scheduled.end - scheduled.start == 1 and scheduled.start >= scheduled.request.num_prompt
    )


def _inputs(step: Sequence[Scheduled], rows: int, blocks: int, cache: PagedCache) -> NDArray[np.int64]:
    """Return the inputs of a graph, int64 [n].

    The inputs are the ids, KV cache positions, lengths and slots for states (read and written) of all requests, then
    the table of KV blocks, and then the positions, axis by axis. Surplus rows are requests of one token in the scratch
    block.
    """
    size, num_spare = cache.block_size, rows - len(step)
    held = [s.request.kv_blocks[: -(-s.stop // size)] for s in step]
    table = block_table([*held, *[[cache.scratch]] * num_spare], cache.padding)
    positions = np.concatenate([s.request.positions(s.start, s.stop) for s in step], axis=1)
    return np.concatenate(
        [
            *[s.request.ids(s.start, s.stop) for s in step],
            np.zeros(num_spare, np.int64),
            [own[-1] * size + s.start % size for own, s in zip(held, step, strict=True)],
            cache.scratch * size + np.arange(num_spare) % size,
            [s.stop for s in step],
            np.ones(num_spare, np.int64),
            np.pad([s.reads for s in step], (0, num_spare), constant_values=cache.scratch_slot),
            np.pad([s.writes for s in step], (0, num_spare), constant_values=cache.scratch_slot),
            np.pad(table, ((0, 0), (0, blocks - table.shape[1])), constant_values=cache.padding).ravel(),
            np.pad(positions, ((0, 0), (0, num_spare))).ravel(),
        ]
    )


def _lengths(inputs: NDArray[np.int64], rows: int) -> list[int]:
    """Return the lengths in the inputs of a graph."""
    lengths: list[int] = inputs[2 * rows : 3 * rows].tolist()
    return lengths


def _power(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
