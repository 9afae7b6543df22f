"""The tokens that a step draws. The next step reads them on the device, before they have arrived on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import Download, Uploads
from mindie_mm.engine.ranks import Ranks
from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.sampler import RowSettings, Scores, changes, logprobs_of, score, without_tokens
from mindie_mm.engine.scheduler import Scheduled

NO_TOKEN = -1
"""Token that a draw reports if the request's own settings exclude all tokens."""
Draw = tuple[int, list[TokenLogprob] | None]
"""A token with its log-probabilities. These are None if the request did not ask for them."""

_NAMED = -2
"""Key of the rows whose requests set `logprob_token_ids`."""


class Draws:
    """The next token of each of several requests, on its way to the host."""

    def __init__(self, requests: Sequence[Request], tokens: Tensor, highest: Tensor, scores: dict[int, Scores]) -> None:
        """Begin the download of the tokens and of everything that the host needs to report them.

        Args:
            requests: The request of each row.
            tokens: Drawn tokens on the device, int64 [rows], all of them in the vocabulary.
            highest: Highest logit of each row, float32 [rows]. If it is NaN or infinite, the row is invalid. If it is
                minus infinity, the request's settings exclude all tokens.
            scores: Log-probabilities of the rows in `_asking`, with the same keys.

        """
        self._requests = requests
        self._tokens = tokens
        parts = [part for one in scores.values() for part in (one.chosen, one.top, one.top_ids)]
        self._arriving = Download(highest, tokens, *parts)

    def write(self, ids: Tensor, step: Sequence[Scheduled]) -> None:
        """Write the tokens that the host does not know yet to their places in the ids of the next step.

        Args:
            ids: Ids of the step's tokens, int64 [T] or longer, changed in place.
            step: Tokens of the step.

        """
        self.writing(step, Uploads(ids.device))(ids)

    def writing(self, step: Sequence[Scheduled], uploads: Uploads) -> Callable[[Tensor], object]:
        """Return a function of `ids` that does the same as `write`. Its indices are among `uploads`."""
        sources = {request: row for row, request in enumerate(self._requests)}
        row, places, drawn = -1, [], []
        for scheduled in step:
            row += scheduled.stop - scheduled.start
            if scheduled.stop > len(scheduled.request.token_ids):
                places.append(row)
                drawn.append(sources[scheduled.request])
        if not places:
            return lambda _: None
        all_rows = drawn == [*range(len(self._tokens))]
        rows = None if all_rows else uploads.add(np.array(drawn, np.int64))
        # A step of decodes needs no list of places on the device.
        where = None if places == [*range(len(places))] else uploads.add(np.array(places, np.int64))

        def write(ids: Tensor) -> None:
            tokens = self._tokens if rows is None else self._tokens.index_select(0, rows())
            if where is None:
                ids[: len(places)].copy_(tokens)
            else:
                ids.index_copy_(0, where(), tokens)

        return write

    def wait(self) -> list[Draw | None]:
        """Wait for the tokens, and return the draw of each request.

        The result is None for a row whose logits contain NaN or plus infinity. The causes of such values are an
        overflow of the model's dtype and non-finite embeddings.
        """
        highest, tokens, *parts = self._arriving.wait()
        # Lists of a few numbers take less time than operators.
        tops: list[float] = highest.tolist()
        drawn = [NO_TOKEN if top == -math.inf else token for token, top in zip(tokens.tolist(), tops, strict=True)]
        logprobs: dict[int, list[TokenLogprob]] = {}
        groups = _asking(self._requests).values() if parts else ()
        for n, group in enumerate(groups):
            for i, one in zip(group, logprobs_of([drawn[i] for i in group], *parts[3 * n :][:3]), strict=True):
                logprobs[i] = [_trimmed(one, self._requests[i].params.logprob_token_ids)]
        return [
            (token, logprobs.get(i)) if top < math.inf else None
            for i, (token, top) in enumerate(zip(drawn, tops, strict=True))
        ]


@torch.inference_mode()
def draw(
    logits: Tensor,
    requests: Sequence[Request],
    constrain: Callable[[Tensor, Sequence[Request]], bool],
    eos_token_ids: tuple[int, ...],
    ranks: Ranks,
    settings: RowSettings | None = None,
) -> Draws:
    """Draw the next token of each request. The host does not wait for the device.

    Rank 0 draws for all ranks, because a request without a seed gets a different random seed on each rank. Only rank 0
    gets log-probabilities.

    Args:
        logits: Raw logits, float32 [requests, vocabulary], changed in place.
        requests: The request of each row.
        constrain: Function that sets the logits of tokens that a structured output does not allow to minus infinity,
            and returns whether it may have changed any.
        eos_token_ids: See `sample`.
        ranks: Ranks that run the same step.
        settings: Settings of the rows, if they are on the device.

    """
    scores: dict[int, Scores] = {}
    if ranks.number == 0:
        uploads = Uploads(logits.device)
        settings = settings or RowSettings.of(requests, logits.shape[1], uploads)
        # Copy the rows first, because sampling changes the logits in place, and log-probabilities describe raw logits.
        asking = _asking(requests)
        rows = {key: uploads.add(np.array(group, np.int64)) for key, group in asking.items()}
        named = {key: uploads.add(_named_ids(requests, group)) for key, group in asking.items() if key == _NAMED}
        change = changes(requests, logits.shape[1], eos_token_ids, uploads)
        raw = {key: logits.index_select(0, group()) for key, group in rows.items()}
        highest, tokens = logits.max(dim=1)  # NaN if any logit is NaN
        is_changed = constrain(logits, requests)
        if change is not None:
            change(logits)
        if settings.draws:
            tokens = settings.draw(logits)
        elif is_changed or change is not None:
            tokens = logits.argmax(dim=1)
        for key, group in rows.items():
            ids = named[key]() if key in named else None
            scores[key] = score(raw[key], tokens.index_select(0, group()), key, ids)
        if (excluded := without_tokens(logits, requests)) is not None:
            highest.masked_fill_(excluded & (highest < torch.inf), -torch.inf)
    else:
        highest = torch.empty(len(requests), dtype=torch.float32, device=logits.device)
        tokens = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    ranks.broadcast_tensor(highest)
    ranks.broadcast_tensor(tokens)
    return Draws(requests, tokens, highest, scores)


def _asking(requests: Sequence[Request]) -> dict[int, list[int]]:
    """Return the rows that need log-probabilities, grouped by the number of most likely tokens that they report.

    Rows that report given tokens are grouped under the key `_NAMED`.
    """
    rows: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if (num_top := request.params.logprobs) is not None:
            rows.setdefault(num_top if request.params.logprob_token_ids is None else _NAMED, []).append(row)
    return rows


def _named_ids(requests: Sequence[Request], rows: Sequence[int]) -> NDArray[np.int64]:
    """Return the `logprob_token_ids` of the rows, int64 [rows, n], padded with 0."""
    named = [requests[row].params.logprob_token_ids or () for row in rows]
    ids = np.zeros((len(rows), max(map(len, named))), np.int64)
    for own, wanted in zip(ids, named, strict=True):
        own[: len(wanted)] = wanted
    return ids


def _trimmed(one: TokenLogprob, named: Sequence[int] | None) -> TokenLogprob:
    """Remove the padding of `_named_ids`."""
    return one if named is None else msgspec.structs.replace(one, top=one.top[: len(named)])
