"""From logits to tokens, each row by its own request's settings; nothing here makes the host wait for a device."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from mindie_mm.device import download, upload
from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.requests.sequence import Sequence

_PIECE = 256
"""Tokens of the vocabulary that are weighed together before one of them is drawn."""


@torch.inference_mode()
def sample(logits: Tensor, sequences: abc.Sequence[Sequence], eos_token_ids: tuple[int, ...]) -> Tensor:
    """The next token of each sequence, int64 [rows], from logits float32 [rows, vocabulary], changed in place.

    A row's draw depends on nothing but its logits, settings and generator: not on its neighbours.
    """
    _bias(logits, sequences, eos_token_ids)
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, sequence in enumerate(sequences) if not sequence.params.greedy]
    if drawn:
        rows = _indices(drawn, logits.device)
        tokens.index_copy_(0, rows, _draw(logits.index_select(0, rows), [sequences[i] for i in drawn]))
    return tokens


_Weights = list[tuple[int, NDArray[np.int64], float | NDArray[np.floating]]]
"""Rows, tokens of each, and a number for all of these, or one for each."""


def _bias(logits: Tensor, sequences: abc.Sequence[Sequence], eos_token_ids: tuple[int, ...]) -> None:
    """Adds the requests' own preferences to their logits, float32 [rows, vocabulary], in place; most have none.

    Those of all rows at once: launched row by row, they would take longer than the draws.
    """
    flat, vocab_size = logits.view(-1), logits.shape[1]
    given: _Weights = []
    repeated: _Weights = []
    generated: _Weights = []
    for row, sequence in enumerate(sequences):
        params, prompt, counts = sequence.params, sequence.unique_prompt_ids, sequence.output_counts
        if params.logit_bias:
            given.append((row, _array(params.logit_bias), np.array([*params.logit_bias.values()], np.float64)))
        if params.repetition_penalty != 1:
            # A prompt may hold ids that have no logits. One that is in both is twice here, with the same new score.
            ids = np.concatenate([prompt[prompt < vocab_size], _array(counts)])
            repeated.append((row, ids, params.repetition_penalty))
        if (params.presence_penalty or params.frequency_penalty) and counts:
            penalties = params.presence_penalty + params.frequency_penalty * _array(counts.values())
            generated.append((row, _array(counts), -penalties))
        if sequence.num_output < params.min_tokens:
            generated.append((row, _array((*eos_token_ids, *params.stop_token_ids)), -np.inf))
    if given:
        flat.index_add_(0, *_placed(given, logits))
    if repeated:
        places, penalty = _placed(repeated, logits)
        scores = flat.index_select(0, places)
        flat.index_copy_(0, places, torch.where(scores > 0, scores / penalty, scores * penalty))
    if generated:
        flat.index_add_(0, *_placed(generated, logits))


def _placed(weights: _Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Their places in the flattened logits, int64 [n], and their numbers, float32 [n]."""
    places = np.concatenate([row * logits.shape[1] + ids for row, ids, _ in weights])
    numbers = np.concatenate([np.broadcast_to(np.asarray(values, np.float32), len(ids)) for _, ids, values in weights])
    return upload(places, logits.device), upload(numbers, logits.device)


def _array(values: abc.Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, len(values))


def _indices(values: abc.Iterable[int], device: torch.device) -> Tensor:
    return upload(torch.tensor([*values], dtype=torch.int64), device)


def _draw(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Tensor:
    """Tokens drawn from logits float32 [rows, vocabulary] by temperature, top_k, top_p and min_p, in that order."""

    def column(name: str) -> Tensor:
        return upload([[getattr(sequence.params, name)] for sequence in sequences], logits.device)

    logits = logits / column("temperature")
    if any(_filters(sequence.params) for sequence in sequences):
        top_k, top_p, min_p = column("top_k"), column("top_p"), column("min_p")
        scores, order = logits.sort(dim=-1, descending=True)
        rank = torch.arange(scores.shape[-1], device=logits.device)
        scores = scores.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
        probabilities = scores.softmax(dim=-1)
        # A token stays while the ones before it have not reached top_p: the likeliest always does.
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = (before >= top_p) & (top_p < 1) & (rank > 0)  # even where float32 has no number as small as top_p
        dropped |= probabilities < min_p * probabilities[:, :1]
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, scores.masked_fill(dropped, -torch.inf))
    probabilities = logits.softmax(dim=-1)
    uniform = upload(
        torch.stack([torch.rand(2, generator=sequence.generator) for sequence in sequences]), logits.device
    )
    # First a piece of the vocabulary, then a token in it: one running sum over all would lose the many unlikely ones.
    pieces = pad(probabilities, (0, -probabilities.shape[-1] % _PIECE)).unflatten(-1, (-1, _PIECE))
    piece = _pick(pieces.sum(dim=-1), uniform[:, :1])
    own = pieces.gather(1, piece.unsqueeze(-1).expand(-1, -1, _PIECE)).squeeze(1)
    return (piece * _PIECE + _pick(own, uniform[:, 1:])).squeeze(1)


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows, 1] drawn in proportion to weights float32 [rows, n], by uniform float32 [rows, 1] in [0, 1)."""
    ends = weights.cumsum(dim=-1)
    total = ends[:, -1:]
    target = (uniform * total).minimum(total * (1 - torch.finfo(total.dtype).eps))  # below it, however that rounds
    # The first end above the target: a parallel sum may rise, by its last digit, where the weight is nought.
    count = weights.shape[-1]
    places = torch.arange(count, device=weights.device)
    place = places.masked_fill(~((ends > target) & (weights > 0)), count).amin(dim=-1, keepdim=True)
    return torch.where(place < count, place, weights.argmax(dim=-1, keepdim=True))


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities where the logits are; `logprobs_of` reads them once they are on the host."""

    chosen: Tensor
    """float32 [rows], of the tokens asked for."""
    top: Tensor
    """float32 [rows, num_top], the greatest, descending."""
    top_ids: Tensor
    """int64 [rows, num_top]."""


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Scores:
    """Log-probabilities of token_ids int64 [rows] under raw logits float32 [rows, vocabulary], and the likeliest ones.

    That of an id outside the vocabulary, which a prompt may hold, is minus infinity.
    """
    logprobs = logits.log_softmax(dim=-1)
    ids = token_ids.unsqueeze(1)
    known = logprobs.gather(1, ids.clamp(max=logits.shape[-1] - 1))
    top, top_ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return Scores(known.masked_fill(ids >= logits.shape[-1], -torch.inf).squeeze(1), top, top_ids)


def logprobs_of(token_ids: abc.Sequence[int], chosen: Tensor, top: Tensor, top_ids: Tensor) -> list[TokenLogprob]:
    """What is told of the tokens whose `Scores`, on the host, these are."""
    return [
        TokenLogprob(token, logprob, list(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(token_ids, chosen.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    ]


def token_logprobs(logits: Tensor, token_ids: abc.Sequence[int], num_top: int) -> list[TokenLogprob]:
    """`score` and `logprobs_of` in one, with a wait for the device."""
    scores = score(logits, _indices(token_ids, logits.device), num_top)
    return logprobs_of(token_ids, *download(scores.chosen, scores.top, scores.top_ids))
