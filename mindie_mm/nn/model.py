"""The model's half of a family: ids with words in, logits out. `seq2seq.py` has that of an encoder-decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.errors import CorruptReference, FeatureCountMismatch
from mindie_mm.nn.paged_batch import Chunk, PagedBatch, PagedCache
from mindie_mm.nn.splice import ItemView, MediaItem, MediaShape, Splice, plain_ids, read_media, splice
from mindie_mm.nn.staging import settle, to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.processes import faults
from mindie_mm.shm.mindie import SegmentsView

EMBEDDINGS = "embeddings"
"""The array, float [num_features, width], of an item whose features were handed in instead of media."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes that the engine needs of a loaded model."""

    vocab_size: int
    """Width of the logits."""
    hidden_size: int
    max_model_len: int
    """Most positions, from the checkpoint's config."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence, from generation_config.json or config.json; those that have no logits end none."""
    device: torch.device
    dtype: torch.dtype
    value_head_dim: int | None = None
    """Width of the values, where it is not that of the keys, `head_dim`."""
    embedding_size: int | None = None
    """Ids that a prompt may hold, where they are more than `vocab_size`."""
    extra_width: int = 0
    """Columns of the features behind the hidden ones, which `decode` is given apart."""

    def __post_init__(self) -> None:
        known = tuple(token for token in self.eos_token_ids if 0 <= token < self.vocab_size)
        object.__setattr__(self, "eos_token_ids", known)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV cache that one token takes."""
        widths = self.head_dim + (self.value_head_dim or self.head_dim)
        return self.num_layers * self.num_kv_heads * widths * self.dtype.itemsize

    @property
    def feature_bytes(self) -> int:
        """Bytes of one of a tower's features."""
        return (self.hidden_size + self.extra_width) * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int, block_size: int, num_layers: int | None = None) -> PagedCache:
        """Return a KV cache of `num_blocks` blocks of `block_size` tokens on the device, for all layers if None."""
        return PagedCache.allocate(
            num_layers=num_layers or self.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim or self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )


@dataclass(frozen=True, slots=True)
class Positions:
    """Where a sequence's tokens stand, on one axis or several."""

    prompt: Tensor
    """int64 [axes, length], of the prompt's tokens."""
    delta: int = 0
    """Added to a later token's index it gives its position."""
    held_axes: int = 0
    """As many axes, the last ones, keep for later tokens what they are for the prompt's last."""

    def of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions of tokens [start, stop), of prompt or output: int64 [axes, stop - start]."""
        axes, length = self.prompt.shape
        if start >= length and stop - start == 1 and not self.held_axes:
            return np.full((axes, 1), start + self.delta)  # being decoded: every step comes here for every sequence
        prompt: NDArray[np.int64] = self.prompt.numpy()
        known = prompt[:, start : min(stop, length)]
        if stop <= length:
            return known
        count, moving = stop - max(start, length), axes - self.held_axes
        later = np.repeat(prompt[:, -1:], count, axis=1)
        later[:moving] = np.arange(stop - count, stop) + self.delta
        return np.concatenate([known, later], axis=1)


class MediaModel(ABC):
    """The part of a loaded model that reads media: from words to features."""

    spec: ModelSpec
    module: Any
    """All of it, an nn.Module."""
    traits: ClassVar[Traits] = Traits()
    """How it differs from most."""

    @abstractmethod
    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Features of each item, [num_features, hidden and `extra_width` columns], in the order of its slots.

        Copies the arrays to the device first.
        """

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        """What the arrays of an item on MindIE's wire are; CorruptReference if they are none of the family's."""
        raise CorruptReference(f"the segments hold {', '.join(view)}, none of this model's")

    def read(self, ids: NDArray[np.int64]) -> list[MediaItem]:
        """The media items that the words in ids, int64 [T], name; errors as `read_media`."""
        return read_media(ids, self._describe, self.traits.mindie_layouts.values())

    def _describe(self, view: ItemView) -> MediaShape:
        """What the arrays of an item are; CorruptReference if they do not say."""
        return self.describe_segments(view) if isinstance(view, SegmentsView) else MediaShape.of(view)

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """The features of each item; StaleReference if a block was freed or reused while it was read."""
        try:
            features = self._features(items)
            faults.point("mid-tower")
        finally:
            settle(self.spec.device)
            # Also where the tower failed: bytes of another content may be why.
            for item in items:
                item.view.verify()
        return features

    def _features(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Each item's features, from the tower; where embeddings were handed in instead of media, these."""
        through_tower = [item for item in items if EMBEDDINGS not in item.view]
        encoded = iter(self.tower(through_tower) if through_tower else ())
        features = [next(encoded) if EMBEDDINGS not in item.view else self._given(item) for item in items]
        for item, rows in zip(items, features, strict=True):
            if len(rows) != item.shape.num_features:
                raise FeatureCountMismatch(
                    f"the {item.shape.kind} has {item.shape.num_features} slots, its features are {len(rows)}"
                )
        return features

    def _given(self, item: MediaItem) -> Tensor:
        width, expected = item.view[EMBEDDINGS].shape[1], self.spec.hidden_size + self.spec.extra_width
        if width != expected:
            raise CorruptReference(f"the {item.shape.kind}'s embeddings are {width} wide, the model's {expected}")
        return to_device(item.view, EMBEDDINGS, self.spec.device).to(self.spec.dtype, copy=True)


class Model(MediaModel):
    """A loaded decoder. A family says how its media are described, placed and encoded, and runs its layers."""

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        """Positions of a prompt of `length` tokens: the index, unless the family says otherwise."""
        return Positions(torch.arange(length).unsqueeze(0))

    def bidirectional_spans(self, length: int, items: Sequence[MediaItem]) -> Tensor | None:
        """int64 [length]: number, from 0, of the span whose tokens attend to each other both ways; -1: causal alone.

        None: all causal. Positions from a span's first token to its last are computed in one step.
        """
        return None

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]; ids are plain."""

    @abstractmethod
    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        """The decoder's layers and last norm over a flat batch: [T, hidden] and [axes, T] -> [T, hidden].

        `extra` [T, extra_width], zero where no feature stands; None where the family has none, or the batch no media.
        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> logits float32 [rows, vocabulary]."""

    @torch.inference_mode()
    def states(
        self, input_ids: Tensor, positions: Tensor, splices: Sequence[Splice], paged: PagedBatch, rows: Tensor | None
    ) -> Tensor:
        """What `head` takes, [rows, hidden], of a flat batch.

        input_ids int64 [T]; a word among them stands on a slot that `splices` overwrites. positions int64 [axes, T];
        rows int64, or None for all.
        """
        hidden = splice(self.embed(input_ids.clamp(min=0)), splices, add=self.traits.splice_adds)
        hidden = self.decode(hidden, positions, paged, self._extra(hidden, splices))
        return hidden if rows is None else hidden.index_select(0, rows)

    def _extra(self, hidden: Tensor, splices: Sequence[Splice]) -> Tensor | None:
        if not self.spec.extra_width or not splices:
            return None
        extra = hidden.new_zeros(len(hidden), self.spec.extra_width)
        width = hidden.shape[1]
        return splice(extra, [Splice(piece.rows, piece.features[:, width:]) for piece in splices])

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits float32 [T, vocabulary] of one whole sequence of ids, int64 [T] with words, no cache."""
        return packed_logits(self, [input_ids])[0]


@torch.inference_mode()
def packed_logits(model: Model, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of several whole sequences, as `Model.logits` returns them, computed in one flat batch."""
    plain: list[Tensor] = []
    positions: list[Tensor] = []
    chunks: list[Chunk] = []
    items: list[tuple[int, MediaItem]] = []
    offset = 0
    for sequence in sequences:
        ids = sequence.cpu().numpy()
        found = model.read(ids)
        plain.append(torch.from_numpy(plain_ids(ids, found)))
        positions.append(model.positions(len(ids), found).prompt)
        chunks.append(Chunk(0, len(ids), (), model.bidirectional_spans(len(ids), found)))
        items += [(offset, item) for item in found]
        offset += len(ids)
    features = model.encode([item for _, item in items]) if items else []
    device = model.spec.device
    states = model.states(
        torch.cat(plain).to(device),
        torch.cat(positions, dim=1).to(device),
        [Splice(start + item.slots, feature) for (start, item), feature in zip(items, features, strict=True)],
        PagedBatch(chunks, None, device),
        None,
    )
    return list(model.head(states).split([len(ids) for ids in plain]))
