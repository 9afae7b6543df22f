"""Decode steps that are captured once for a size, and then launched as one: on a GPU, CUDA graphs.

A step of one new token for each sequence launches some dozen operators a layer, which takes the host longer than a GPU
needs for them. What a graph reads lies in one tensor, written before each launch; sizes are powers of two, so that
there are few.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import Device, block_table, kind_of, upload
from mindie_mm.engine.ranks import Ranks
from mindie_mm.engine.scheduler import Scheduled
from mindie_mm.nn.model import Model
from mindie_mm.nn.paged_batch import GraphBatch, PagedCache
from mindie_mm.settings.config import EngineConfig

_log = logging.getLogger(__name__)

MOST_SLOTS = 2**16
"""Most tokens of the KV cache that a captured graph gathers, padding included. Beyond, launches are no longer what
takes the time, and the padding to the longest sequence might."""


def captures_graphs(device: type[Device], config: EngineConfig, ranks: Ranks) -> bool:
    """Whether an engine on such a device captures its decode steps as graphs."""
    # Not with several ranks: one that could not capture what the others do would leave them waiting.
    return device.records and ranks.count == 1 and not config.enforce_eager


def most_rows(max_num_seqs: int, block_size: int) -> int:
    """Most rows of a captured graph."""
    return max(1, min(_power(max_num_seqs), MOST_SLOTS // block_size))


def most_blocks(num_rows: int, num_tokens: int, block_size: int) -> int:
    """Most blocks that each row of such a step has, of sequences with so many tokens at most."""
    return max(1, min(_power(-(-num_tokens // block_size)), MOST_SLOTS // (num_rows * block_size)))


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: Tensor
    """int64 [n], as `_inputs` lays them out."""
    launch: Callable[[], object]


class DecodeGraphs:
    """The captured graphs of one model's decode steps over one KV cache."""

    def __init__(self, model: Model, cache: PagedCache, max_num_seqs: int) -> None:
        spec = model.spec
        self._model = model
        self._cache = cache
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """By the rows of the step, and the blocks of each."""
        self._most_slots = MOST_SLOTS
        """As MOST_SLOTS; less where memory lacked for as many, none where a step could not be captured."""
        num_rows = most_rows(max_num_seqs, cache.block_size)
        self._logits = torch.empty(num_rows, spec.vocab_size, dtype=torch.float32, device=spec.device)

    def logits(self, step: abc.Sequence[Scheduled]) -> Tensor | None:
        """float32 [sequences, vocabulary] of a step, valid until the next one; None for one that is not captured.

        That is every step with something of a prompt, and one whose sequences are too long.
        """
        if not self._most_slots or not all(_is_decode(scheduled) for scheduled in step):
            return None
        size = self._cache.block_size
        rows, blocks = _power(len(step)), _power(max(-(-scheduled.stop // size) for scheduled in step))
        if rows * blocks * size > self._most_slots:
            return None
        # The last sequence stands in the rows that are too many: the same numbers are written once more.
        inputs = upload(_inputs([*step, *[step[-1]] * (rows - len(step))], blocks, self._cache), self._logits.device)
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
            # Whatever it is, the step itself has not failed: it is computed again, operator by operator.
            # Of two errors the first says why; the one behind it, that the capture was spoiled.
            why = error.__context__ or error
            slots, which = rows * blocks * self._cache.block_size, ""
            if isinstance(why, torch.OutOfMemoryError):  # sizes halve: this comes a few times at most
                which = f" that gather {slots} tokens or more"
            self._most_slots = slots // 2 if which else 0
            _log.warning("decode steps%s are not recorded, each operator is launched by itself: %s", which, why)
            self._graphs.clear()  # their memory is the step's; smaller ones are captured again
            return None


def _is_decode(scheduled: Scheduled) -> bool:
    """Whether it is the last token of an output, and nothing else."""
    return (
        scheduled.samples and scheduled.stop - scheduled.start == 1 and scheduled.start >= scheduled.sequence.num_prompt
    )


def _inputs(step: abc.Sequence[Scheduled], blocks: int, cache: PagedCache) -> NDArray[np.int64]:
    """int64 [n]: each sequence's id, slot and length, its row of the block table, then the positions, axis by axis."""
    size = cache.block_size
    held = [s.sequence.blocks[: -(-s.stop // size)] for s in step]
    table = block_table(held, cache.padding)
    return np.concatenate(
        [
            [s.sequence.token_ids[s.start] for s in step],
            [own[-1] * size + s.start % size for own, s in zip(held, step, strict=True)],
            [s.stop for s in step],
            np.pad(table, ((0, 0), (0, blocks - table.shape[1])), constant_values=cache.padding).ravel(),
            np.concatenate([s.sequence.positions(s.start, s.stop) for s in step], axis=1).ravel(),
        ]
    )


def _power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()
