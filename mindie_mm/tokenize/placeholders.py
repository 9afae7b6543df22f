"""From ids with one placeholder per media item to ids with one per feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindie_mm.errors import InputError
from mindie_mm.inputs import Kind
from mindie_mm.nn.family import Placeholder
from mindie_mm.tokenize.prompt import Prompt, Span


@dataclass(frozen=True, slots=True)
class Run:
    """What a media item takes in a prompt."""

    kind: Kind
    placeholder: Placeholder
    num_tokens: int


def expand(ids: Sequence[int], runs: Sequence[Run]) -> Prompt:
    """`ids` with the k-th placeholder repeated as the k-th run asks; no words yet.

    InputError where the placeholders are not those of the runs, in number or in order: a template can drop an item.
    """
    tokens = {run.placeholder.token for run in runs}
    flat = np.asarray(ids, np.int64)
    places = np.flatnonzero(sum((flat == token for token in tokens), np.zeros(len(flat), bool)))
    found, expected = flat[places].tolist(), [run.placeholder.token for run in runs]
    if found != expected:
        raise InputError(
            f"the prompt has {len(found)} media placeholders for {len(expected)} media items, or in another order: "
            "the chat template does not take these messages"
        )
    repeats = np.ones(len(flat), np.int64)
    repeats[places] = [run.num_tokens for run in runs]
    starts = np.cumsum(repeats) - repeats
    spans = tuple(
        Span(
            start=int(starts[place]),
            stop=int(starts[place]) + run.num_tokens,
            kind=run.kind,
            token=run.placeholder.token,
            lead=_adjoining(flat[:place][::-1], run.placeholder.before[::-1]),
            tail=_adjoining(flat[place + 1 :], run.placeholder.after),
        )
        for place, run in zip(places, runs, strict=True)
    )
    return Prompt(np.repeat(flat, repeats), spans)


def _adjoining(ids: np.ndarray[tuple[int], np.dtype[np.int64]], wanted: Sequence[int]) -> int:
    return len(wanted) if ids[: len(wanted)].tolist() == list(wanted) else 0
