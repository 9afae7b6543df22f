"""Batches for trainers: padded or packed rows of ids with masks, labels, positions and the arrays of media items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mindie_mm.batch.output.sample import Sample, SampleItem
from mindie_mm.errors import InputError
from mindie_mm.inputs import type_of
from mindie_mm.settings.limits import python_number

if TYPE_CHECKING:
    from torch import Tensor

    from mindie_mm.nn.model_inputs import ModelInputs

Padding = Literal["left", "right"]
Labels = Literal["assistant", "all"]
IGNORED = -100
"""Label of a token that does not count in the loss, as in PyTorch's cross entropy."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample of a batch."""

    tokens: Mapping[str, Tensor]
    """Arrays with one entry per token."""
    items: Sequence[SampleItem]
    """Media items, in order."""

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

    samples, packing = _checked(samples, padding, labels, packing)
    if packing and (why := processor.traits.not_packed):
        raise InputError(f"packing is not supported for this model, because {why}")
    rows = [_row(sample, processor, labels) for sample in samples]
    if not packing:
        return _batch(rows, processor, pad_token, padding)
    gap = int(processor.traits.packs_apart)
    groups = _groups([len(row) for row in rows], packing, gap)
    rows = [rows[index] for group in groups for index in group]
    batch = _batch(rows, processor, pad_token, "right", gap)
    batch["position_ids"] = processor.position_ids(batch)
    for name in [*rows[0].tokens, "position_ids"]:
        own = iter([batch[name][..., index, : len(row) + gap] for index, row in enumerate(rows)])
        packed = [torch.cat([next(own) for _ in group], -1) for group in groups]
        packed = [row[..., : row.shape[-1] - gap] for row in packed]
        batch[name] = _stacked(name, packed, packing, pad_token, padding)
    # Without a mask and a cache, transformers begins a sample where a position is not one more than the one before it.
    mask = batch.pop("attention_mask").bool()
    if gap:
        batch["position_ids"] = torch.where(mask, torch.arange(packing), packing - 1)
    return {**batch, "use_cache": False}


def _checked(samples: Any, padding: Any, labels: Any, packing: Any) -> tuple[list[Sample], int]:
    """Return the samples and `packing`. Raise InputError if an argument has a wrong type or value."""
    if not isinstance(samples, Iterable):
        raise InputError(f"samples is {type_of(samples)}; it must be a list of samples")
    samples = [*samples]
    if not samples:
        raise InputError("samples is empty; it must have at least one sample without an error")
    for index, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise InputError(f"samples[{index}] is {type_of(sample)}; it must be a sample of a Dataset")
    if not isinstance(padding, str) or padding not in ("left", "right"):
        raise InputError(f"padding={padding!r} must be left or right")
    if labels is not None and (not isinstance(labels, str) or labels not in ("assistant", "all")):
        raise InputError(f"labels={labels!r} must be assistant, all or None")
    packing = python_number(packing)
    if not isinstance(packing, int) or isinstance(packing, bool) or packing < 0:
        raise InputError(f"packing={packing!r} must be a number of tokens, or 0 for one sample per row")
    return samples, packing


def _batch(
    rows: Sequence[_Row], processor: ModelInputs, pad_token: int, padding: Padding, further: int = 0
) -> dict[str, Tensor]:
    """Return a batch with one sample per row. Each row has at least `further` padding tokens."""
    import torch

    from mindie_mm.nn.model_inputs import writable

    length = max(map(len, rows)) + further
    batch = {
        name: _stacked(name, [row.tokens[name] for row in rows], length, pad_token, padding) for name in rows[0].tokens
    }
    before = [length - len(row) if padding == "left" else 0 for row in rows]
    items = [
        [replace(item, slots=item.slots + start) for item in row.items] for row, start in zip(rows, before, strict=True)
    ]
    arrays = writable(processor.media_inputs(items, torch.device("cpu")), [item for own in items for item in own])
    return batch | {name: array.contiguous() for name, array in arrays.items()}


def _stacked(name: str, rows: Sequence[Tensor], length: int, pad_token: int, padding: Padding) -> Tensor:
    """Stack the array `name` of each row, [..., tokens], after padding it to `length` tokens."""
    import torch

    value = {"input_ids": pad_token, "labels": IGNORED}.get(name, 0)
    missing = [length - row.shape[-1] for row in rows]
    ends = [(count, 0) if padding == "left" else (0, count) for count in missing]
    pad = torch.nn.functional.pad
    return torch.stack([pad(row, end, value=value) for row, end in zip(rows, ends, strict=True)], -2)


def _row(sample: Sample, processor: ModelInputs, labels: Labels | None) -> _Row:
    import torch

    ids, items = sample.usable()
    tokens = processor.token_inputs(ids, items)
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


def _groups(lengths: Sequence[int], size: int, gap: int) -> list[list[int]]:
    """Assign samples to rows of at most `size` tokens, each to the first one that has room.

    Args:
        lengths: Number of tokens of each sample.
        size: Number of tokens of a row.
        gap: Number of padding tokens between two samples.

    Returns:
        The indices of the samples of each row.

    Raises:
        InputError: A sample is longer than a row.

    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        if length > size:
            raise InputError(f"a sample has {length} tokens, but packing is {size}, the number of tokens of a row")
        row = next((row for row, left in enumerate(room) if gap + length <= left), None)
        if row is None:
            groups.append([index])
            room.append(size - length)
        else:
            groups[row].append(index)
            room[row] -= gap + length
    return groups
