"""Sampling of tokens from logits. Each row has its own settings.

Only `token_logprobs` makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from mindie_mm.device import download, upload
from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.requests.sampling_params import ALL_TOKENS, SamplingParams

DRAWS_PER_TOKEN = 2
"""Number of random numbers that a sampled token takes from its generator."""
_PIECE = 256
"""Number of tokens per piece of the vocabulary. A piece is drawn first, and then a token in this piece."""


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request], eos_token_ids: tuple[int, ...]) -> Tensor:
    """Sample the next token of each request.

    The token of a row depends only on the row's logits, settings and generator, and not on other rows.

    Args:
        logits: Raw logits, float32 [rows, vocabulary], changed in place.
        requests: Request of each row.
        eos_token_ids: End-of-request ids. They are masked until a request has `min_tokens` tokens.

    Returns:
        Tokens, int64 [rows].

    """
    _bias(logits, requests, eos_token_ids)
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, request in enumerate(requests) if not request.params.greedy]
    if drawn:
        rows = _indices(drawn, logits.device)
        tokens.index_copy_(0, rows, _draw(logits.index_select(0, rows), [requests[i] for i in drawn]))
    return tokens


_Weights = list[tuple[int, NDArray[np.int64], float | NDArray[np.floating]]]
"""Tuples of a row, its token ids, and either one value for all of these ids or one value per id."""


def _bias(logits: Tensor, requests: Sequence[Request], eos_token_ids: tuple[int, ...]) -> None:
    """Apply biases and penalties to the logits, float32 [rows, vocabulary], in place.

    All rows are processed together, because launching kernels for each row would take longer than sampling.
    """
    flat, vocab_size = logits.view(-1), logits.shape[1]
    _allow(logits, requests)
    given: _Weights = []
    repeated: _Weights = []
    generated: _Weights = []
    for row, request in enumerate(requests):
        params, prompt, counts = request.params, request.unique_prompt_ids, request.output_counts
        if params.logit_bias:
            given.append((row, _array(params.logit_bias), np.array([*params.logit_bias.values()], np.float64)))
        if params.repetition_penalty != 1:
            # A prompt may contain ids without logits. If an id is in both arrays, the same score is written twice.
            ids = np.concatenate([prompt[prompt < vocab_size], _array(counts)])
            repeated.append((row, ids, params.repetition_penalty))
        if (params.presence_penalty or params.frequency_penalty) and counts:
            penalties = params.presence_penalty + params.frequency_penalty * _array(counts.values())
            generated.append((row, _array(counts), -penalties))
        if params.bad_token_ids:
            generated.append((row, _array(_bad_tokens(request)), -np.inf))
        if request.num_output < params.min_tokens:
            generated.append((row, _array((*eos_token_ids, *params.stop_token_ids)), -np.inf))
    if given:
        flat.index_add_(0, *_placed(given, logits))
    if repeated:
        places, penalty = _placed(repeated, logits)
        scores = flat.index_select(0, places)
        flat.index_copy_(0, places, torch.where(scores > 0, scores / penalty, scores * penalty))
    if generated:
        flat.index_add_(0, *_placed(generated, logits))


def _allow(logits: Tensor, requests: Sequence[Request]) -> None:
    """Mask, in place, the tokens that a request's `allowed_token_ids` do not contain."""
    rows = [row for row, one in enumerate(requests) if one.params.allowed_token_ids is not None]
    if not rows:
        return
    refused = upload(np.stack([requests[row].refused(logits.shape[1]) for row in rows]), logits.device)
    places = _indices(rows, logits.device)
    logits.index_copy_(0, places, logits.index_select(0, places).masked_fill(refused, -torch.inf))


def _bad_tokens(request: Request) -> set[int]:
    """Return the tokens that would complete one of the request's `bad_token_ids`."""
    bad = request.params.bad_token_ids
    longest = max(map(len, bad)) - 1
    tail = tuple(request.token_ids[max(request.num_prompt, len(request.token_ids) - longest) :]) if longest else ()
    return {ids[-1] for ids in bad if len(ids) == 1 or tail[1 - len(ids) :] == ids[:-1]}


def without_tokens(logits: Tensor, requests: Sequence[Request]) -> Tensor | None:
    """Return for each request whether its settings exclude all tokens, bool [requests].

    Return None if no request has settings that exclude tokens.
    """
    if not any(one.params.allowed_token_ids is not None or one.params.bad_token_ids for one in requests):
        return None
    return (logits == -torch.inf).all(dim=1)


def _placed(weights: _Weights, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices into the flattened logits, int64 [n], and the values, float32 [n]."""
    places = np.concatenate([row * logits.shape[1] + ids for row, ids, _ in weights])
    numbers = np.concatenate([np.broadcast_to(np.asarray(values, np.float32), len(ids)) for _, ids, values in weights])
    return upload(places, logits.device), upload(numbers, logits.device)


def _array(values: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, len(values))


def _indices(values: Iterable[int], device: torch.device) -> Tensor:
    return upload(torch.tensor([*values], dtype=torch.int64), device)


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Draw tokens, int64 [rows], from logits float32 [rows, vocabulary].

    Temperature, top_k, top_p and min_p are applied in this order.
    """

    def column(name: str) -> Tensor:
        return upload([[getattr(request.params, name)] for request in requests], logits.device)

    logits = logits / column("temperature")
    if any(_filters(request.params) for request in requests):
        top_k, top_p, min_p = column("top_k"), column("top_p"), column("min_p")
        scores = logits.sort(dim=-1, descending=True).values
        rank = torch.arange(scores.shape[-1], device=logits.device)
        scores = scores.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
        probabilities = scores.softmax(dim=-1)
        # A token is kept if the sum of the more likely tokens is below top_p.
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = (before >= top_p) & (top_p < 1) & (rank > 0)  # keep the likeliest token even if top_p underflows
        dropped |= (probabilities < min_p * probabilities[:, :1]) | (scores == -torch.inf)
        # Compare with the lowest score that is kept, because scattering the scores to the places of their ids is slow
        # on NPUs. Equal scores are all kept, as in vLLM.
        lowest = scores.masked_fill(dropped, torch.inf).amin(dim=-1, keepdim=True)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    uniform = upload(
        torch.stack([torch.rand(DRAWS_PER_TOKEN, generator=request.generator) for request in requests]),
        logits.device,
    )
    # Draw a piece of the vocabulary, then a token in this piece. In one cumulative sum over the whole vocabulary,
    # rounding would remove many unlikely tokens.
    pieces = pad(probabilities, (0, -probabilities.shape[-1] % _PIECE)).unflatten(-1, (-1, _PIECE))
    piece = _pick(pieces.sum(dim=-1), uniform[:, :1])
    own = pieces.gather(1, piece.unsqueeze(-1).expand(-1, -1, _PIECE)).squeeze(1)
    return (piece * _PIECE + _pick(own, uniform[:, 1:])).squeeze(1)


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index per row in proportion to its weights.

    Args:
        weights: Weights, float32 [rows, n].
        uniform: Random numbers in [0, 1), float32 [rows, 1].

    Returns:
        Indices, int64 [rows, 1].

    """
    ends = weights.cumsum(dim=-1)
    total = ends[:, -1:]
    target = (uniform * total).minimum(total * (1 - torch.finfo(total.dtype).eps))  # below the total despite rounding
    # Find the first partial sum above the target. Skip weights of 0, because a parallel sum may increase there through
    # rounding.
    count = weights.shape[-1]
    places = torch.arange(count, device=weights.device)
    place = places.masked_fill(~((ends > target) & (weights > 0)), count).amin(dim=-1, keepdim=True)
    return torch.where(place < count, place, weights.argmax(dim=-1, keepdim=True))


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities on the device. After a download to the host, `logprobs_of` converts them."""

    chosen: Tensor
    """Log-probability of each row's token, float32 [rows]."""
    top: Tensor
    """Highest log-probabilities, float32 [rows, num_top], descending."""
    top_ids: Tensor
    """Token ids of `top`, int64 [rows, num_top]."""


def score(logits: Tensor, token_ids: Tensor, num_top: int, chosen_ids: Tensor | None = None) -> Scores:
    """Compute the log-probabilities of given tokens and of the most likely tokens.

    Args:
        logits: Raw logits, float32 [rows, vocabulary].
        token_ids: Token of each row, int64 [rows]. A prompt may contain an id outside the vocabulary, whose
            log-probability is minus infinity.
        num_top: Number of most likely tokens. -1 means the whole vocabulary.
        chosen_ids: Tokens to return instead of the most likely tokens, int64 [rows, n].

    """
    logprobs = logits.log_softmax(dim=-1)
    ids, vocab_size = token_ids.unsqueeze(1), logits.shape[-1]
    known = logprobs.gather(1, ids.clamp(max=vocab_size - 1))
    if chosen_ids is None:
        top, top_ids = logprobs.topk(vocab_size if num_top == ALL_TOKENS else min(num_top, vocab_size), dim=-1)
    else:
        top, top_ids = logprobs.gather(1, chosen_ids), chosen_ids
    return Scores(known.masked_fill(ids >= vocab_size, -torch.inf).squeeze(1), top, top_ids)


def logprobs_of(token_ids: Sequence[int], chosen: Tensor, top: Tensor, top_ids: Tensor) -> list[TokenLogprob]:
    """Convert the fields of `Scores` on the host to the log-probabilities of `token_ids`."""
    return [
        TokenLogprob(token, logprob, list(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(token_ids, chosen.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    ]


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of given tokens, with their ranks, and of the most likely tokens.

    The host waits for the device.
    """
    ids = _indices(token_ids, logits.device)
    scores = score(logits, ids, num_top)
    ranks = 1 + (logits > logits.gather(1, ids.clamp(max=logits.shape[-1] - 1).unsqueeze(1))).sum(dim=-1)
    ranks.masked_fill_(ids >= logits.shape[-1], logits.shape[-1] + 1)
    *on_host, ranks = download(scores.chosen, scores.top, scores.top_ids, ranks)
    logprobs = logprobs_of(token_ids, *on_host)
    return [replace(one, rank=rank) for one, rank in zip(logprobs, ranks.tolist(), strict=True)]
