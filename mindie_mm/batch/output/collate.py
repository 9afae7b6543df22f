"""Batches for trainers: padded or packed rows of ids with masks, labels, positions and the arrays of media items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mindie_mm.batch.output.sample import Sample, SampleItem
from mindie_mm.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from mindie_mm.nn.model_inputs import ModelInputs

Padding = Literal["left", "right"]
Labels = Literal["assistant", "all"]
IGNORED = -100
"""Label of a token that does not count in the loss, as in PyTorch's cross entropy."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample, or several packed samples, in a row of a batch."""

    tokens: Mapping[str, Tensor]
    """Arrays with one entry per token."""
    items: Sequence[SampleItem]
    """Media items, in order. Their slots are indices in the row."""

    def __len__(self) -> int:
        return len(next(iter(self.tokens.values())))


def collate(
    samples: Sequence[Sample],
    processor: ModelInputs,
    pad_token: int,
    padding: Padding,
    labels: Labels | None,
    packing: int,
) -> dict[str, Any]:
    """Implement `Dataset.collate`. `pad_token` fills rows up."""
    import torch  # imported late, because reading samples does not need it

    from mindie_mm.nn.model_inputs import writable

    if not samples:
        raise InputError("samples is empty; it must have at least one sample without an error")
    if padding not in ("left", "right"):
        raise InputError(f"padding is {padding!r}; it must be left or right")
    if labels not in (None, "assistant", "all"):
        raise InputError(f"labels is {labels!r}; it must be assistant, all or None")
    if packing and not processor.traits.packs_samples:
        raise InputError("packing is not supported for this model, whose positions, states or attention span a row")
    rows = [_row(sample, processor, labels) for sample in samples]
    if packing:
        rows = _packed(rows, packing)
    length = packing or max(map(len, rows))
    filling = {"input_ids": pad_token, "labels": IGNORED}
    batch: dict[str, Tensor] = {}
    for name in rows[0].tokens:
        missing = [(length - len(row), 0) if padding == "left" else (0, length - len(row)) for row in rows]
        batch[name] = torch.stack(
            [
                torch.nn.functional.pad(row.tokens[name], ends, value=filling.get(name, 0))
                for row, ends in zip(rows, missing, strict=True)
            ]
        )
    items = [[_moved(item, before) for item in row.items] for row, (before, _) in zip(rows, missing, strict=True)]
    arrays = writable(processor.media_inputs(items, torch.device("cpu")), [item for own in items for item in own])
    batch |= {name: array.contiguous() for name, array in arrays.items()}
    if packing:
        # Without a mask and a cache, transformers separates samples where positions begin again.
        return {name: array for name, array in batch.items() if name != "attention_mask"} | {"use_cache": False}
    return batch


def _row(sample: Sample, processor: ModelInputs, labels: Labels | None) -> _Row:
    import torch

    ids, items = sample.usable()
    tokens = processor.token_inputs(ids, items)
    if processor.traits.packs_samples:
        tokens["position_ids"] = torch.arange(len(ids))
    if labels is not None:
        counted = np.ones(len(ids), np.bool_)
        if labels == "assistant":
            counted[:] = False
            for start, stop in sample.answers():
                counted[start:stop] = True
        counted[0] = False  # it would be predicted from padding, or from the sample before
        for span in sample.spans:  # a model does not generate the tokens of media, and may have no logits for them
            counted[span.start - span.lead : span.stop + span.tail] = False
        tokens["labels"] = torch.from_numpy(np.where(counted, ids, IGNORED))
    return _Row(tokens, items)


def _packed(rows: Sequence[_Row], size: int) -> list[_Row]:
    """Join rows to rows of at most `size` tokens, each to the first one that has room.

    Raise InputError if a row is longer.
    """
    import torch

    groups: list[list[_Row]] = []
    for row in rows:
        if len(row) > size:
            raise InputError(f"a sample has {len(row)} tokens, but packing is {size}, the number of tokens of a row")
        group = next((group for group in groups if sum(map(len, group)) + len(row) <= size), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    packed = []
    for group in groups:
        starts = np.cumsum([0, *map(len, group[:-1])]).tolist()
        items = [_moved(item, start) for row, start in zip(group, starts, strict=True) for item in row.items]
        tokens = {name: torch.cat([row.tokens[name] for row in group]) for name in group[0].tokens}
        packed.append(_Row(tokens, items))
    return packed


def _moved(item: SampleItem, by: int) -> SampleItem:
    return replace(item, slots=item.slots + by)
