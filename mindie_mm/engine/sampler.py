"""Sampling of tokens from logits. Each row has its own settings.

Only `token_logprobs` makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from mindie_mm.device import Uploads, download, kernels_of, upload
from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.requests.sampling_params import ALL_TOKENS

DRAWS_PER_TOKEN = 2
"""Number of random numbers that a sampled token takes from its generator."""
_UNIT = 2.0**-24
"""Distance between random numbers in float32."""
_PIECE = 256
"""Number of tokens per piece of the vocabulary."""


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
    uploads = Uploads(logits.device)
    settings = RowSettings.of(requests, logits.shape[1], uploads)
    if (change := changes(requests, logits.shape[1], eos_token_ids, uploads)) is not None:
        change(logits)
    return settings.draw(logits) if settings.draws else logits.argmax(dim=-1)


class RowSettings:
    """The settings that decide how a token of each row is drawn, with their random numbers.

    They do not depend on earlier tokens of the requests, so they can be copied to the device before these are known.
    """

    def __init__(self, host: Mapping[str, NDArray[Any]], vocab_size: int, uploads: Uploads) -> None:
        """Prepare the settings. `host` has the result of `_host_settings`, or is empty if all rows are greedy."""
        self.draws = bool(host)
        """True if any row is drawn at random. Otherwise, the likeliest tokens are taken."""
        self._host = host
        self._vocab_size = vocab_size
        self._device = uploads.device
        if not host:
            return
        count = len(host["temperature"])
        self._limits_rank, self._limits_sum, self._limits_ratio = (
            bool(used.any()) for used in (host["rank"] > 0, host["limit"] > 0, host["ratio"] > -np.inf)
        )
        rows = np.arange(count) * vocab_size
        # Places in the flattened scores: of the lowest score that `top_k` keeps, and of the highest score, per row.
        self._places = uploads.add(np.concatenate([rows + host["rank"], rows + vocab_size - 1]))
        # The second random number adds digits to the first, with which the first sums are told apart.
        first, second = host["uniform"].T
        columns = {**host, "place": np.minimum(first + second * _UNIT, 1 - _UNIT)}
        self._columns = {
            name: uploads.add(columns[name].astype(np.float32).reshape(count, -1))
            for name in ("temperature", "limit", "ratio", "place", "uniform")
        }

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, uploads: Uploads) -> RowSettings:
        """Return the settings of the next token of each request, which take random numbers from the generators."""
        if all(request.params.greedy for request in requests):
            return cls({}, vocab_size, uploads)
        return cls(_host_settings(requests, vocab_size), vocab_size, uploads)

    def of_rows(self, rows: Sequence[int]) -> RowSettings:
        """Return the settings of some rows."""
        host = {name: values[rows] for name, values in self._host.items()}
        return RowSettings(host if rows else {}, self._vocab_size, Uploads(self._device))

    def draw(self, logits: Tensor) -> Tensor:
        """Draw tokens, int64 [rows], from logits float32 [rows, vocabulary].

        Temperature, top_k, top_p and min_p are applied in this order.
        """
        if kernels_of(self._device).counts_launches:
            return self._draw_sorted(logits)
        tokens = logits.argmax(dim=-1)
        is_random = self._host["uniform"].any(axis=1)
        filters = (self._host["rank"] > 0) | (self._host["limit"] > 0) | (self._host["ratio"] > -np.inf)
        # Sorting a vocabulary of 152,064 tokens takes 50 ms per row on the CPU.
        for chosen, way in ((filters & is_random, RowSettings._draw_sorted), (~filters, RowSettings._draw_in_pieces)):
            if chosen.any():
                numbers = chosen.nonzero()[0]
                own = self if len(numbers) == len(logits) else self.of_rows(numbers.tolist())
                rows = upload(numbers, self._device)
                tokens.index_copy_(0, rows, way(own, logits.index_select(0, rows)))
        return tokens

    def _draw_in_pieces(self, logits: Tensor) -> Tensor:
        """Draw a piece of the vocabulary, then a token in this piece, without any filter.

        In one cumulative sum over the whole vocabulary, rounding would remove many unlikely tokens.
        """
        probabilities = (logits / self._columns["temperature"]()).softmax(dim=-1)
        uniform = self._columns["uniform"]()
        pieces = pad(probabilities, (0, -probabilities.shape[-1] % _PIECE)).unflatten(-1, (-1, _PIECE))
        piece = _pick(pieces.sum(dim=-1), uniform[:, :1])
        own = pieces.gather(1, piece.unsqueeze(-1).expand(-1, -1, _PIECE)).squeeze(1)
        return (piece * _PIECE + _pick(own, uniform[:, 1:])).squeeze(1)

    def _draw_sorted(self, logits: Tensor) -> Tensor:
        """Draw in the order of the scores."""
        # Writing to the places of the ids would be slow on NPUs. The order is ascending, so that the sums of small
        # weights come first and are not rounded away. It is stable, so that equal scores have the same order in any
        # batch.
        scores, ids = (logits / self._columns["temperature"]()).sort(dim=-1, stable=True)
        places = self._places()
        lowest, highest = scores.view(-1).index_select(0, places).view(2, -1, 1)
        if self._limits_rank:  # scores that are equal to the lowest one are kept, as in vLLM
            scores.masked_fill_(scores < lowest, -torch.inf)
        weights = scores.softmax(dim=-1)
        dropped = None
        if self._limits_sum:
            dropped = weights.cumsum(dim=-1) <= self._columns["limit"]()
        if self._limits_ratio:
            is_low = scores < highest + self._columns["ratio"]()
            dropped = is_low if dropped is None else dropped | is_low
        if dropped is not None:
            weights.masked_fill_(dropped, 0)
        ends = weights.cumsum(dim=-1)
        total = ends.view(-1).index_select(0, places[len(logits) :]).view(-1, 1)
        # Weights of 0 come first, and their sums are exactly 0, so that none of them is drawn. If rounding drops
        # all tokens, the likeliest one is drawn. A row with NaN gets any token, which is not used.
        count = (ends <= total * self._columns["place"]()).sum(dim=-1, keepdim=True)
        return ids.gather(1, count.clamp_(max=ids.shape[-1] - 1)).squeeze(1)


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


def _host_settings(requests: Sequence[Request], vocab_size: int) -> dict[str, NDArray[Any]]:
    """Return the settings of each row. A greedy row takes the first of the likeliest tokens.

    - `temperature`: float64.
    - `rank`: number of tokens that top_k drops, int64.
    - `limit`: sum of the probabilities that top_p drops, float64.
    - `ratio`: logarithm of min_p, float64.
    - `uniform`: random numbers in [0, 1), float64 [rows, DRAWS_PER_TOKEN]. They are 0 in greedy rows.
    """
    params = [request.params for request in requests]
    top_p = np.array([1.0 if one.greedy else one.top_p for one in params])
    # A sum of at most 1 / vocab_size is reached by the likeliest token. The difference from 1 would be rounded.
    single = np.array([one.greedy for one in params]) | (top_p <= 1 / vocab_size)
    top_k = np.array([one.top_k if one.top_k > 0 else vocab_size for one in params])
    min_p = np.array([0.0 if one.greedy else one.min_p for one in params])
    with np.errstate(divide="ignore"):
        ratio = np.log(min_p)
    drawn = [
        torch.rand(DRAWS_PER_TOKEN, generator=request.generator).tolist() if request.generator is not None else (0, 0)
        for request in requests
    ]
    return {
        "temperature": np.array([1.0 if one.greedy else one.temperature for one in params]),
        "rank": vocab_size - np.where(single, 1, np.minimum(top_k, vocab_size)),
        "limit": np.where(single, 0, 1 - top_p),
        "ratio": ratio,
        "uniform": np.array(drawn),
    }


_Weights = list[tuple[int, NDArray[np.int64], float | NDArray[np.floating]]]
"""Tuples of a row, its token ids, and either one value for all of these ids or one value per id."""


def changes(
    requests: Sequence[Request], vocab_size: int, eos_token_ids: tuple[int, ...], uploads: Uploads
) -> Callable[[Tensor], None] | None:
    """Return a function that applies biases and penalties to logits, float32 [rows, vocabulary], in place.

    Return None if no request has any. All rows are processed together, because launching kernels for each row would
    take longer than sampling.
    """
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
    steps = [
        *_allowing(requests, vocab_size, uploads),
        *_adding(given, vocab_size, uploads),
        *_repeating(repeated, vocab_size, uploads),
        *_adding(generated, vocab_size, uploads),
    ]

    def change(logits: Tensor) -> None:
        for step in steps:
            step(logits)

    return change if steps else None


_Step = Callable[[Tensor], object]


def _allowing(requests: Sequence[Request], vocab_size: int, uploads: Uploads) -> Iterator[_Step]:
    """Yield a step that masks the tokens that a request's `allowed_token_ids` do not contain."""
    rows = [row for row, one in enumerate(requests) if one.params.allowed_token_ids is not None]
    if not rows:
        return
    refused = uploads.add(np.stack([requests[row].refused(vocab_size) for row in rows]))
    places = uploads.add(np.array(rows, np.int64))
    yield lambda logits: logits.index_copy_(
        0, places(), logits.index_select(0, places()).masked_fill_(refused(), -torch.inf)
    )


def _adding(weights: _Weights, vocab_size: int, uploads: Uploads) -> Iterator[_Step]:
    """Yield a step that adds weights to logits."""
    if weights:
        places, values = _placed(weights, vocab_size, uploads)
        yield lambda logits: logits.view(-1).index_add_(0, places(), values())


def _repeating(weights: _Weights, vocab_size: int, uploads: Uploads) -> Iterator[_Step]:
    """Yield a step that applies repetition penalties. A score is divided by the penalty, or multiplied if negative."""
    if not weights:
        return
    places, penalty = _placed(weights, vocab_size, uploads)
    inverse = uploads.add(_numbers([(row, ids, 1 / value) for row, ids, value in weights]))

    def step(logits: Tensor) -> None:
        scores = logits.view(-1).index_select(0, places())
        logits.view(-1).index_copy_(0, places(), scores / torch.where(scores > 0, penalty(), inverse()))

    yield step


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


def _placed(weights: _Weights, vocab_size: int, uploads: Uploads) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the indices into the flattened logits, int64 [n], and the values, float32 [n], once they are copied."""
    places = np.concatenate([row * vocab_size + ids for row, ids, _ in weights])
    return uploads.add(places), uploads.add(_numbers(weights))


def _numbers(weights: _Weights) -> NDArray[np.float32]:
    return np.concatenate([np.broadcast_to(np.asarray(values, np.float32), len(ids)) for _, ids, values in weights])


def _array(values: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, len(values))


def _indices(values: Iterable[int], device: torch.device) -> Tensor:
    return upload(torch.tensor([*values], dtype=torch.int64), device)


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
