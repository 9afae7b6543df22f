"""The model's half of a family: ids with words in, logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm import faults
from mindie_mm.inputs import Kind
from mindie_mm.nn.attention import Chunk, PagedBatch, PagedCache
from mindie_mm.nn.mindie import Layout
from mindie_mm.nn.splice import ItemView, MediaItem, MediaShape, Splice, plain_ids, read_media, splice


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes that the engine needs of a loaded model."""

    vocab_size: int
    max_model_len: int
    """Most positions, from the checkpoint's config."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence, from generation_config.json or config.json."""
    device: torch.device
    dtype: torch.dtype


class Model(ABC):
    """A loaded model. A family says how its media are described, placed and encoded, and runs its layers."""

    spec: ModelSpec
    mindie_layouts: ClassVar[Mapping[Kind, Layout]] = MappingProxyType({})
    """The slots of each kind on MindIE's wire; none, and ids of that wire are refused."""

    @abstractmethod
    def describe(self, view: ItemView) -> MediaShape:
        """What the arrays of an item are; CorruptReference if they are none of the family's."""

    @abstractmethod
    def positions(self, length: int, items: Sequence[MediaItem]) -> tuple[Tensor, int]:
        """Positions of a prompt's tokens, int64 [axes, length], and what to add to the index of each later token."""

    @abstractmethod
    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Features of each view's item, [num_features, hidden]; copies the arrays to the device first."""

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]; ids are plain."""

    @abstractmethod
    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch) -> Tensor:
        """The decoder's layers and last norm over a flat batch: [T, hidden] and [axes, T] -> [T, hidden]."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> logits float32 [rows, vocabulary]."""

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, splices: Sequence[Splice], paged: PagedBatch, rows: Tensor | None
    ) -> Tensor:
        """Logits float32 [rows, vocabulary] of a flat batch.

        input_ids int64 [T]; a word among them stands on a slot that `splices` overwrites. positions int64 [axes, T];
        rows int64, or None for all.
        """
        hidden = splice(self.embed(input_ids.clamp(min=0)), splices)
        hidden = self.decode(hidden, positions, paged)
        return self.head(hidden if rows is None else hidden.index_select(0, rows))

    def read(self, ids: NDArray[np.int64]) -> list[MediaItem]:
        """The media items that the words in ids, int64 [T], name; errors as `read_media`."""
        return read_media(ids, self.describe, self.mindie_layouts.values())

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """The tower's features of each item; StaleReference if a block was freed or reused while it was read."""
        try:
            features = self.tower(items)
            faults.point("mid-tower")
        finally:
            # Also where the tower failed: bytes of another content may be why.
            for item in items:
                item.view.verify()
        return features

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits float32 [T, vocabulary] of one whole sequence of ids, int64 [T] with words, no cache."""
        return self.packed_logits([input_ids])[0]

    def packed_logits(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """The same for several sequences in one flat batch."""
        plain: list[Tensor] = []
        positions: list[Tensor] = []
        items: list[tuple[int, MediaItem]] = []
        offset = 0
        for sequence in sequences:
            ids = sequence.cpu().numpy()
            found = self.read(ids)
            plain.append(torch.from_numpy(plain_ids(ids, found)))
            positions.append(self.positions(len(ids), found)[0])
            items += [(offset + item.start, item) for item in found]
            offset += len(ids)
        features = self.encode([item for _, item in items]) if items else []
        lengths = [len(ids) for ids in plain]
        device = self.spec.device
        logits = self.forward(
            torch.cat(plain).to(device),
            torch.cat(positions, dim=1).to(device),
            [Splice(start, feature) for (start, _), feature in zip(items, features, strict=True)],
            PagedBatch.build([Chunk(0, length, ()) for length in lengths], None, device),
            None,
        )
        return list(logits.split(lengths))

    def allocate_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        """A KV cache of `num_blocks` blocks of `block_size` tokens on the model's device."""
        spec = self.spec
        return PagedCache.allocate(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
            device=spec.device,
        )
