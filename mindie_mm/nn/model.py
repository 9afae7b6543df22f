"""Base classes of decoder-only models, from token ids with handle words to logits.

`seq2seq.py` has the base class of encoder-decoder models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mindie_mm.errors import CorruptReference, FeatureCountMismatch, UnsupportedCheckpoint
from mindie_mm.inputs import PROMPT
from mindie_mm.nn.lora.adapter import Adapter
from mindie_mm.nn.lora.loras import Loras
from mindie_mm.nn.model_inputs import EMBEDDINGS, ModelInputs
from mindie_mm.nn.paged_batch import Chunk, PagedBatch
from mindie_mm.nn.paged_cache import KVLayer, Layer, PagedCache, StateLayer
from mindie_mm.nn.splice import ItemView, MediaItem, Splice, plain_ids, read_media, splice, without_prompt_embeds
from mindie_mm.nn.staging import settle, to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.processes import faults
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsView


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a loaded model that the engine needs."""

    vocab_size: int
    """Width of the logits."""
    hidden_size: int
    max_model_len: int
    """Maximum number of positions, from the checkpoint's config."""
    layers: tuple[Layer, ...]
    """Data that each layer of the decoder keeps between steps."""
    eos_token_ids: tuple[int, ...]
    """Ids of the tokens that end a sequence.

    Ids outside [0, vocab_size) are dropped, because the model cannot produce them.
    """
    device: torch.device
    dtype: torch.dtype
    embedding_size: int | None = None
    """Number of different ids that a prompt may contain. None means `vocab_size`."""
    extra_width: int = 0
    """Number of columns of a feature beyond `hidden_size`. They are passed to `decode` as `extra`."""
    has_head: bool = True
    """True if the checkpoint has an output layer. Without it, only hidden states can be pooled."""

    def __post_init__(self) -> None:
        known = tuple(token for token in self.eos_token_ids if 0 <= token < self.vocab_size)
        object.__setattr__(self, "eos_token_ids", known)

    @property
    def kv_token_bytes(self) -> int:
        """Size of the keys and values of one token in all layers, in bytes."""
        return sum(self._kv_bytes)

    @property
    def kv_layer_bytes(self) -> int:
        """Size of the keys and values of one token in the layer with the largest, in bytes."""
        return max(self._kv_bytes)

    @property
    def state_bytes(self) -> int:
        """Size of the states of one sequence in all layers, in bytes."""
        return sum(layer.num_bytes for layer in self.layers if isinstance(layer, StateLayer))

    @property
    def _kv_bytes(self) -> list[int]:
        layers = [layer for layer in self.layers if isinstance(layer, KVLayer)]
        return [layer.num_kv_heads * sum(layer.widths) * self.dtype.itemsize for layer in layers]

    @property
    def feature_bytes(self) -> int:
        """Size of one feature of a tower, in bytes."""
        return (self.hidden_size + self.extra_width) * self.dtype.itemsize

    def allocate_cache(
        self, num_blocks: int, block_size: int, num_slots: int = 0, *, is_shared: bool = False
    ) -> PagedCache:
        """Allocate a cache on the device. `PagedCache.allocate` describes the arguments."""
        return PagedCache.allocate(
            self.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            dtype=self.dtype,
            device=self.device,
            is_shared=is_shared,
        )


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of a sequence's tokens on one or several axes."""

    prompt: Tensor
    """Positions of the prompt's tokens, int64 [axes, length]."""
    delta: int = 0
    """Difference between the position and the index of each token after the prompt."""
    held_axes: int = 0
    """Number of trailing axes whose position stays fixed after the prompt."""
    longer: Positions | None = None
    """Positions of all tokens if prompt and output have more than `most_tokens` tokens. None means that they stay the
    same."""
    most_tokens: int = 0
    """These positions are valid if prompt and output together have at most this number of tokens. Only used with
    `longer`."""

    def of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions of tokens [start, stop) of prompt and output, int64 [axes, stop - start]."""
        axes, length = self.prompt.shape
        if start >= length and stop - start == 1 and not self.held_axes:
            return np.full((axes, 1), start + self.delta)  # fast path, taken in every decode step for every sequence
        prompt: NDArray[np.int64] = self.prompt.numpy()
        known = prompt[:, start : min(stop, length)]
        if stop <= length:
            return known
        count, moving = stop - max(start, length), axes - self.held_axes
        later = np.repeat(prompt[:, -1:], count, axis=1)
        later[:moving] = np.arange(stop - count, stop) + self.delta
        return np.concatenate([known, later], axis=1)


class MediaModel(ABC):
    """The part of a loaded model that turns handle words into features."""

    spec: ModelSpec
    module: Any
    """The nn.Module of the whole model."""
    processor: ModelInputs
    """The processor of the same checkpoint. `load_model` sets it."""
    traits: ClassVar[Traits] = Traits()
    """The ways in which this model differs from most other models."""
    loras: Loras | None = None
    """LoRA adapters, if `enable_loras` has been called."""
    media_tokens: Collection[int] = ()
    """Placeholder ids, for models with `traits.mindie_prompt_layout`."""

    @abstractmethod
    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Copy the items' arrays to the device and run the tower on them.

        Returns:
            Features of each item, [num_features, hidden_size + extra_width], in the order of the item's placeholders.

        """

    def normalized(self, item: MediaItem) -> Tensor:
        """Return the normalized pixels of an item on the model's device."""
        return self.processor.normalized(item, self.spec.device)

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        """Return the shape of an item in MindIE's wire format.

        Raises:
            CorruptReference: The arrays do not belong to this family.

        """
        raise CorruptReference(f"the segments contain the arrays {', '.join(view)}; this model uses none of them")

    def segment_items(self, ids: NDArray[np.int64], view: SegmentsView, start: int) -> list[MediaItem]:
        """Return the items of a prompt whose segments contain all of its media (`traits.mindie_prompt_layout`).

        Args:
            ids: Ids with handle words, int64 [T].
            view: Arrays of all fields of the layout that the prompt has.
            start: Index of the first handle word, or of the zeros before it.

        Raises:
            CorruptReference: The arrays do not belong to this family.
            FeatureCountMismatch: The ids have more or fewer placeholders than the items have features.

        """
        raise CorruptReference(f"the segments contain the arrays {', '.join(view)}; this model uses none of them")

    def read(self, ids: NDArray[np.int64]) -> list[MediaItem]:
        """Return the media items that the handle words in `ids` refer to. `ids` is int64 [T].

        This method raises the same errors as `read_media`.
        """
        if (layout := self.traits.mindie_prompt_layout) is not None:
            attached = layout.attach(ids, self.media_tokens)
            if attached is not None:
                return self.segment_items(ids, *attached)
        return read_media(ids, self._describe, self.traits.mindie_layouts.values())

    def _describe(self, view: ItemView) -> MediaShape:
        return self.describe_segments(view) if isinstance(view, SegmentsView) else MediaShape.of(view)

    def text_modules(self) -> list[nn.Module]:
        """Return the modules that compute text, including the output layer. They contain no tower."""
        return []

    def replace(self, replacements: Mapping[nn.Module, nn.Module]) -> None:
        """Replace modules wherever the model refers to them."""
        for parent in [*self.module.modules()]:
            for name, child in [*parent.named_children()]:
                if child in replacements:
                    setattr(parent, name, replacements[child])
        for name, value in [*vars(self).items()]:
            if isinstance(value, nn.Module) and value in replacements:
                setattr(self, name, replacements[value])

    def fuse(self) -> None:
        """Replace layers with equivalent layers that run fewer operators. By default, do nothing."""

    def compile_steps(self) -> None:
        """Run decode steps in compiled code if this is possible. By default, do nothing."""

    def enable_loras(self, max_loras: int, max_rank: int) -> Loras:
        """Prepare the layers for LoRA adapters, after all other preparations. `Loras` describes the arguments.

        Raises:
            UnsupportedCheckpoint: The family does not serve adapters.

        """
        raise UnsupportedCheckpoint(
            "LoRA adapters are served only for decoder-only families with transformers' layers; merge the adapter into "
            "its base model (merge_and_unload)"
        )

    @contextmanager
    def adapted(self, batch: Iterable[tuple[Adapter | None, int]]) -> Iterator[None]:
        """Apply LoRA adapters to all computations of the model inside the context.

        Args:
            batch: The adapter of each request in the batch, or None, and its number of rows. It is read only if
                adapters are enabled.

        """
        if self.loras is None:
            yield
            return
        with self.loras.applied(self.loras.mix(batch, self.spec.device)):
            yield

    @property
    def is_adapted(self) -> bool:
        """True if an adapter changes some of the rows that the model computes."""
        return self.loras is not None and bool(self.loras.running)

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the features of each item.

        Raises:
            StaleReference: A block was freed or reused while it was read.
            FeatureCountMismatch: An item has more or fewer features than placeholders.
            CorruptReference: Embeddings that were given instead of media have the wrong width.

        """
        try:
            features = self.features_of(items)
            faults.point("mid-tower")
        finally:
            settle(self.spec.device)
            # Verify even if the tower failed, because the cause may be a block that was reused.
            for item in items:
                item.view.verify()
        return features

    def features_of(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the features of each item, from the tower or from the embeddings that were given."""
        through_tower = [item for item in items if EMBEDDINGS not in item.view]
        encoded = iter(self.tower(through_tower) if through_tower else ())
        features = [next(encoded) if EMBEDDINGS not in item.view else self._given(item) for item in items]
        for item, rows in zip(items, features, strict=True):
            if len(rows) != item.shape.num_features:
                raise FeatureCountMismatch(
                    f"the {item.shape.kind} has {item.shape.num_features} placeholder tokens, but {len(rows)} "
                    "features; the numbers must be equal"
                )
        return features

    def _given(self, item: MediaItem) -> Tensor:
        extra_width = 0 if item.shape.kind == PROMPT else self.spec.extra_width
        width, expected = item.view[EMBEDDINGS].shape[1], self.spec.hidden_size + extra_width
        if width != expected:
            raise CorruptReference(
                f"the embeddings of the {item.shape.kind} have width {width}; the model needs {expected}"
            )
        given = to_device(item.view, EMBEDDINGS, self.spec.device).to(self.spec.dtype, copy=True)
        missing = self.spec.extra_width - extra_width
        return nn.functional.pad(given, (0, missing)) if missing else given  # `pad` would copy


class Model(MediaModel):
    """A loaded decoder-only model. Each family implements its tower, positions and layers."""

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        """Return the positions of a prompt of `length` tokens. By default, they are the token indices."""
        return Positions(torch.arange(length).unsqueeze(0))

    def bidirectional_spans(self, length: int, items: Sequence[MediaItem]) -> Tensor | None:
        """Return the bidirectional spans of a prompt of `length` tokens.

        One step computes all tokens from the first to the last of a span.

        Returns:
            int64 [length]. The number of each token's span, counted from 0, or -1 for causal attention. Tokens of one
            span attend to each other in both directions. None if all attention is causal.

        """
        return None

    def ignores_rest(self, cache: PagedCache) -> bool:
        """Return whether no layer reads the rest of a KV block after the end of its sequence. See `PagedCache.clear`.

        By default, return False.
        """
        return False

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of token ids, int64 [T]. The ids contain no handle words."""

    @abstractmethod
    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        """Run the decoder's layers and its final norm over a flat batch.

        Args:
            hidden: Embeddings, [T, hidden].
            positions: int64 [axes, T].
            paged: The tokens that each row attends to, and the KV cache.
            extra: What `layer_inputs` has returned for the batch.

        Returns:
            Hidden states, [T, hidden].

        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [rows, vocabulary], of hidden states [rows, hidden]."""

    @torch.inference_mode()
    def states(
        self, input_ids: Tensor, positions: Tensor, splices: Sequence[Splice], paged: PagedBatch, rows: Tensor | None
    ) -> Tensor:
        """Compute the final hidden states of a flat batch.

        Args:
            input_ids: int64 [T], without handle words.
            positions: int64 [axes, T].
            splices: Features, and the rows that they replace.
            paged: The tokens that each row attends to, and the KV cache.
            rows: int64 [rows], the rows to return. None means all.

        Returns:
            Input of `head`, [rows, hidden].

        """
        hidden = splice(self.embed(input_ids), splices, add=self.traits.splice_adds)
        hidden = self.decode(hidden, positions, paged, self.layer_inputs(input_ids, hidden, splices))
        return hidden if rows is None else hidden.index_select(0, rows)

    def layer_inputs(self, input_ids: Tensor, hidden: Tensor, splices: Sequence[Splice]) -> Tensor | None:
        """Return the numbers that the layers need for each row in addition to its embedding, [T, n], or None.

        By default, return the columns of the features beyond `hidden_size`. They are zero in rows without a feature.
        The result is None if `extra_width` is 0 or the batch has no media.

        Args:
            input_ids: int64 [T], without handle words.
            hidden: Embeddings with the features, [T, hidden].
            splices: Features, and the rows that they replace.

        """
        if not self.spec.extra_width or not splices:
            return None
        extra = hidden.new_zeros(len(hidden), self.spec.extra_width)
        width = hidden.shape[1]
        return splice(extra, [Splice(piece.rows, piece.features[:, width:]) for piece in splices])

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits of one whole sequence, float32 [T, vocabulary].

        `input_ids` is int64 [T] and may contain handle words. No KV cache is used.
        """
        return packed_logits(self, [input_ids])[0]


@torch.inference_mode()
def packed_logits(model: Model, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of each sequence, as `Model.logits` does, but compute all sequences in one flat batch."""
    if not model.spec.has_head:
        raise UnsupportedCheckpoint("the checkpoint has no output layer (lm_head), so there are no logits")
    plain: list[Tensor] = []
    positions: list[Tensor] = []
    chunks: list[Chunk] = []
    items: list[tuple[int, MediaItem]] = []
    offset = 0
    for sequence in sequences:
        ids = sequence.cpu().numpy()
        media_items = model.read(ids)
        plain.append(torch.from_numpy(plain_ids(ids, media_items)))
        media = without_prompt_embeds(media_items)
        positions.append(model.positions(len(ids), media).prompt)
        chunks.append(Chunk(0, len(ids), (), model.bidirectional_spans(len(ids), media)))
        items += [(offset, item) for item in media_items]
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
