"""Execution of a step on the device: the decoder for the flat batch, and the head for the requested rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import Uploads
from mindie_mm.engine.decode_graphs import DecodeGraphs
from mindie_mm.engine.draws import Draws
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.sampler import RowSettings
from mindie_mm.engine.scheduler import Scheduled
from mindie_mm.engine.towers import Features
from mindie_mm.nn.model import Model
from mindie_mm.nn.paged_batch import Chunk, PagedBatch, top_position
from mindie_mm.nn.paged_cache import PagedCache
from mindie_mm.nn.splice import Splice

PROMPT_ROWS = 64
"""Number of prompt rows that one call to the head can always process in the reserved memory."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Hidden states for computing a prompt's log-probabilities in pieces.

    Computing all logits at the same time would need gigabytes of memory.
    """

    request: Request
    start: int
    """Index of the token that the first row predicts."""
    states: Tensor
    """Input of the model's head, [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits of the requested rows. The head does not process other rows."""

    sampled: Tensor
    """Logits of the requests that draw a token, float32 [requests, vocabulary], in the step's order."""
    guessed: Tensor
    """Logits after each guess, float32 [guesses, vocabulary], in the step's order."""
    prompts: list[PromptRows]
    pooled: list[tuple[Request, Tensor]]
    """Hidden states to pool, [rows, hidden], of the requests that ask for it."""
    settings: RowSettings | None = None
    """Settings of the rows in `sampled`, if they are on the device."""


class Runner:
    """An executor that computes scheduled tokens with a model and its KV cache."""

    def __init__(self, model: Model, cache: PagedCache, graphs: DecodeGraphs | None = None) -> None:
        """Create the runner of `model` with `cache`. If `graphs` is None, steps are not captured."""
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self._clears = not model.ignores_rest(cache)

    @torch.inference_mode()
    def forward(self, step: Sequence[Scheduled], features: Features, earlier: Draws | None = None) -> StepLogits:
        """Run the decoder over all tokens of the step, and the head over the requested rows.

        Args:
            step: Tokens to compute.
            features: Features of all media in these tokens.
            earlier: Tokens of the step before, if they have not arrived on the host yet.

        """
        uploads = Uploads(self._model.spec.device)
        blocks = [block for scheduled in step for block in self._begun(scheduled)]
        if self._graphs is not None and all(scheduled.request.adapter is None for scheduled in step):
            logits = self._graphs.logits(step, earlier, blocks)
            if logits is not None:
                return StepLogits(logits, logits[:0], [], [])
        begun = uploads.add(np.array(blocks, np.int64))
        splices: list[Splice] = []
        sampled: list[int] = []
        guessed: list[int] = []
        prompts: list[tuple[Request, int, range]] = []
        pooled: list[tuple[Request, range]] = []
        row = 0
        for scheduled in step:
            request, start, stop = scheduled.request, scheduled.start, scheduled.stop
            for item in request.items_in(start, stop):
                first, last = item.features_in(start, stop)
                if first < last:
                    splices.append(Splice(row - start + item.slots[first:last], features[item.key][first:last]))
            if request.params.prompt_logprobs is not None:
                first = max(start, len(request.prompt_logprobs))
                last = min(stop, request.num_prompt - 1)
                if first < last:
                    prompts.append((request, first + 1, range(row + first - start, row + last - start)))
            if states_of := scheduled.pooled:
                pooled.append((request, range(row + states_of.start - start, row + states_of.stop - start)))
            row += stop - start
            if scheduled.samples:
                sampled.append(row - 1)
            guessed += range(row, row + len(scheduled.guesses))
            row += len(scheduled.guesses)
        wanted = [*sampled, *guessed, *(index for _, _, rows in prompts for index in rows)]
        wanted += [index for _, rows in pooled for index in rows]
        positions = np.concatenate([s.request.positions(s.start, s.end) for s in step], axis=1)
        chunks = [Chunk(s.start, s.end, s.request.kv_blocks, s.request.span_ids, s.reads, s.writes) for s in step]
        placed = uploads.add(positions)
        rows = None if wanted == [*range(row)] else uploads.add(np.array(wanted, np.int64))
        batch = PagedBatch(chunks, self._cache, uploads.device, top_position(positions), uploads)
        settings = RowSettings.of([s.request for s in step if s.samples], self._model.spec.vocab_size, uploads)
        ids = _ids(step, earlier, uploads)
        self._cache.clear(begun())
        with self._model.adapted((s.request.adapter, s.end - s.start) for s in step):
            states = self._model.states(ids, placed(), splices, batch, None if rows is None else rows())
        of_draws, of_pooling = len(sampled) + len(guessed), [len(rows) for _, rows in pooled]
        drawn, *parts = states.split([of_draws, *(len(rows) for _, _, rows in prompts), *of_pooling])
        scored = parts[: len(prompts)]
        sampling = ((s.request.adapter, 1) for s in step if s.samples)
        guessing = ((s.request.adapter, len(s.guesses)) for s in step)
        with self._model.adapted(chain(sampling, guessing)):
            sampled_logits, guessed_logits = self._model.head(drawn).split([len(sampled), len(guessed)])
        return StepLogits(
            sampled_logits,
            guessed_logits,
            [PromptRows(request, first, part) for (request, first, _), part in zip(prompts, scored, strict=True)],
            [(request, part) for (request, _), part in zip(pooled, parts[len(prompts) :], strict=True)],
            settings,
        )

    def _begun(self, scheduled: Scheduled) -> list[int]:
        """Return a list with the KV block that the step must clear, or an empty list.

        This is the block that the step begins but does not fill.
        """
        size, stop = self._cache.block_size, scheduled.end
        last = (stop - 1) // size
        partly = self._clears and stop % size and scheduled.start <= last * size
        return [scheduled.request.kv_blocks[last]] if partly else []


def _ids(step: Sequence[Scheduled], earlier: Draws | None, uploads: Uploads) -> Tensor:
    """Return the ids of all tokens of the step, int64 [T]. This sends `uploads`."""
    known = uploads.add(np.concatenate([s.ids() for s in step]))
    write = None if earlier is None else earlier.writing(step, uploads)
    ids = known()
    if write is not None:
        write(ids)
    return ids
