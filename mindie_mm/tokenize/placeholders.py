"""Expansion of placeholders. It replaces the single id of each media item with one id per feature."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import InputError
from mindie_mm.tokenize.planning import PlannedItem
from mindie_mm.tokenize.prompt import MediaSpan, Prompt


def check_order(actual: Sequence[object], expected: Sequence[object], num_items: int) -> None:
    """Raise InputError unless a prompt has the placeholders that its items need. A template may have dropped some."""
    if [*actual] != [*expected]:
        raise InputError(
            f"the prompt has {len(actual)} media placeholders, but its {num_items} media items need "
            f"{len(expected)}, in the order of the items; the token ids or the chat template do not match the "
            "items"
        )


def expand(
    ids: Sequence[int],
    items: Sequence[PlannedItem],
    tokens: Collection[int],
    opening: int = 0,
    around: Sequence[tuple[int, int]] | None = None,
) -> Prompt:
    """Replace the placeholders in `ids` with the items' runs of ids. The result does not contain handle words.

    Args:
        ids: Prompt with placeholders.
        items: Media items, in order.
        tokens: Placeholders of all kinds that the family supports.
        opening: Number of ids at the beginning of every prompt.
        around: For each item, the number of ids of its spelling before its first and after its last placeholder. By
            default, spellings consist of placeholders.

    Raises:
        InputError: The number or the order of the placeholders does not match the items.

    """
    places = [at for at, index in enumerate(ids) if index in tokens]
    runs = [item.runs for item in items]
    expected = [item.placeholder.token for item, own in zip(items, runs, strict=True) for _ in own]
    check_order([ids[at] for at in places], expected, len(items))
    flat = np.asarray(ids, np.int64)
    pieces: list[NDArray[np.int64]] = []
    spans: list[MediaSpan] = []
    behind = length = taken = 0
    remaining = iter(places)
    around = [(0, 0)] * len(items) if around is None else around
    for item, own, (before, after) in zip(items, runs, around, strict=True):
        first = last = start = -1
        for run in own:
            last = next(remaining)
            pieces += [flat[behind:last], np.asarray(run, np.int64)]
            length += last - behind
            if first < 0:
                first, start = last, length
            length, behind = length + len(run), last + 1
        lead = before + _adjoining(flat[: first - before][::-1], item.placeholder.before[::-1])
        tail = after + _adjoining(flat[last + 1 + after :], item.placeholder.after)
        lead = min(lead, first - taken)  # an id that two spellings share belongs to the first item
        taken = last + 1 + tail
        token, second = item.placeholder.token, item.spelling.second_token
        spans.append(MediaSpan(start, length, item.shape.kind, token, lead, tail, second))
    return Prompt(np.concatenate([*pieces, flat[behind:]]), tuple(spans), (0, opening))


def locate(
    ids: Sequence[int], ranges: Sequence[tuple[int, int]], items: Sequence[PlannedItem], tokens: Collection[int]
) -> Prompt:
    """Return a prompt that already has the items' runs of ids. Only the items in the ranges have placeholders.

    Args:
        ids: The prompt.
        ranges: Range [start, stop) of each item's placeholders, ascending and without overlap. It may contain the ids
            around them. Ids between several runs of an item, such as times of frames, are not compared.
        items: Media items, in order.
        tokens: Placeholders of all kinds that the family supports.

    Raises:
        InputError: The placeholders do not match the items.

    """
    flat = np.asarray(ids, np.int64)
    is_placeholder = np.isin(flat, [*tokens])
    spans: list[MediaSpan] = []
    for item, (start, stop) in zip(items, ranges, strict=True):
        places = start + np.flatnonzero(is_placeholder[start:stop])
        runs = [np.asarray(run, np.int64) for run in item.runs]
        expected = np.concatenate(runs)
        kind, grid = item.shape.kind, item.plan.grid
        if len(places) != item.plan.num_features:
            raise InputError(
                f"the {kind} at token {start} has {len(places)} placeholders, but its tensors have "
                f"{item.plan.num_features} features (grid {grid}); the numbers must be equal"
            )
        first, last = int(places[0]), int(places[-1]) + 1
        if len(runs) > 1:
            own, wanted = flat[places], expected[np.isin(expected, [*tokens])]
        else:
            (ahead,) = np.flatnonzero(np.isin(expected, [*tokens]))[:1]
            first -= int(ahead)
            last = first + len(expected)
            own, wanted = flat[max(first, 0) : last], expected
        if first < 0 or not np.array_equal(own, wanted):
            raise InputError(f"the ids of the {kind} at token {start} are not those of its tensors (grid {grid})")
        second = item.spelling.second_token
        spans.append(MediaSpan(first, last, kind, item.placeholder.token, second_token=second))
    if (num_all := int(is_placeholder.sum())) != (num_own := sum(item.plan.num_features for item in items)):
        raise InputError(f"the prompt has {num_all} placeholders, but its media have {num_own} features")
    return Prompt(flat, tuple(spans))


def insert(
    ids: Sequence[int], at: int, items: Sequence[PlannedItem], tokens: Collection[int], opening: int = 0
) -> Prompt:
    """Insert the items into `ids` before index `at`, with the ids that precede and follow their placeholders.

    `expand` describes the other arguments.
    """
    placeholders = [index for item in items for index in _written(item)]
    prompt = expand([*ids[:at], *placeholders, *ids[at:]], items, tokens)
    ahead = 0 if at >= opening else len(prompt) - len(ids)
    return replace(prompt, opening=(ahead, ahead + opening))


def _written(item: PlannedItem) -> Iterator[int]:
    yield from item.placeholder.before
    yield from (item.placeholder.token for _ in item.runs)
    yield from item.placeholder.after


def _adjoining(ids: NDArray[np.int64], wanted: Sequence[int]) -> int:
    return len(wanted) if ids[: len(wanted)].tolist() == list(wanted) else 0
