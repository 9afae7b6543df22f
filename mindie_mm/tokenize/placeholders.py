"""From ids with a placeholder for each media item to ids with one per feature."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import InputError
from mindie_mm.inputs import Kind
from mindie_mm.nn.family import Placeholder, Spelling
from mindie_mm.tokenize.prompt import Prompt, Span


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a media item takes in a prompt."""

    kind: Kind
    placeholder: Placeholder
    num_features: int
    spelling: Spelling

    @property
    def runs(self) -> Sequence[Sequence[int] | NDArray[np.int64]]:
        """The ids that take the place of each placeholder of the item."""
        if self.spelling.runs is None:
            return (np.full(self.num_features, self.placeholder.token, np.int64),)
        return self.spelling.runs


def expand(ids: Sequence[int], items: Sequence[Expansion], tokens: Collection[int]) -> Prompt:
    """`ids` with the placeholders of the items replaced by their runs; no words yet.

    `tokens` are the placeholders of all media that the family takes.
    InputError where those in `ids` are not those of the items, in number or in order: a template can drop an item.
    """
    flat = np.asarray(ids, np.int64)
    places = np.flatnonzero(sum((flat == token for token in tokens), np.zeros(len(flat), bool)))
    expected = [item.placeholder.token for item in items for _ in item.runs]
    if flat[places].tolist() != expected:
        raise InputError(
            f"the prompt has {len(places)} media placeholders for {len(items)} media items that take {len(expected)}, "
            "or in another order: its ids, or the chat template, do not go with these items"
        )
    pieces: list[NDArray[np.int64]] = []
    spans: list[Span] = []
    behind = length = 0
    remaining = iter(places.tolist())
    for item in items:
        first = last = start = -1
        for run in item.runs:
            last = next(remaining)
            pieces += [flat[behind:last], np.asarray(run, np.int64)]
            length += last - behind
            if first < 0:
                first, start = last, length
            length, behind = length + len(run), last + 1
        lead = _adjoining(flat[:first][::-1], item.placeholder.before[::-1])
        tail = _adjoining(flat[last + 1 :], item.placeholder.after)
        spans.append(Span(start, length, item.kind, item.placeholder.token, lead, tail))
    return Prompt(np.concatenate([*pieces, flat[behind:]]), tuple(spans))


def insert(ids: Sequence[int], at: int, items: Sequence[Expansion], tokens: Collection[int]) -> Prompt:
    """`ids` with the items, each between what its placeholder has before and after it, at `at`; no words yet."""
    placeholders = [index for item in items for index in _written(item)]
    return expand([*ids[:at], *placeholders, *ids[at:]], items, tokens)


def _written(item: Expansion) -> Iterator[int]:
    yield from item.placeholder.before
    yield from (item.placeholder.token for _ in item.runs)
    yield from item.placeholder.after


def _adjoining(ids: NDArray[np.int64], wanted: Sequence[int]) -> int:
    return len(wanted) if ids[: len(wanted)].tolist() == list(wanted) else 0
