"""The memory that a model's layers keep between steps: keys and values in KV blocks, and states in slots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindie_mm.device import zeros
from mindie_mm.errors import InputError


@dataclass(frozen=True, slots=True)
class KVLayer:
    """A layer that keeps a key and a value for each token."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    """Width of the values. None means `head_dim`, the width of the keys."""
    chunk_size: int | None = None
    """Number of tokens of a chunk, a multiple of the block size, if a token attends only to tokens of its own chunk.

    None means that a token attends to all earlier tokens.
    """

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of a key and of a value."""
        return self.head_dim, self.value_head_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A recurrent layer. It keeps tensors of constant size for each sequence, whatever the length of the sequence."""

    shapes: tuple[tuple[int, ...], ...]
    """Shape of each tensor."""
    dtypes: tuple[torch.dtype, ...]
    """Dtype of each tensor."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensors of one sequence in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """A layer that reads the keys and values of an earlier layer."""

    layer: int
    """Index of the earlier layer."""


Layer = KVLayer | StateLayer | SharedLayer


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Keys and values in KV blocks, and states in slots. A sequence may use any blocks in any order."""

    keys: Mapping[int, Tensor]
    """Keys by index of the layer, [blocks + 2, block_size, kv_heads, head_dim].

    The last two blocks belong to no sequence: `padding`, which stays zero, and `scratch`.
    """
    values: Mapping[int, Tensor]
    """Values by index of the layer, [blocks + 2, block_size, kv_heads, value_head_dim]."""
    shared: frozenset[int]
    """Layers that read the keys and values of an earlier layer, and store none."""
    states: Mapping[int, tuple[Tensor, ...]]
    """States by index of the layer, [slots + 1, *shape] each. The last slot, `scratch_slot`, belongs to no sequence."""
    num_blocks: int
    num_slots: int
    block_size: int
    """Number of tokens in a block."""
    memory: tuple[Tensor, ...]
    """Tensors [n, blocks + 2, ...] of all `keys` and `values`. Keys and values of the same size share one."""
    _blank: tuple[Tensor, ...]
    """A block of zeros for each tensor of `memory`, [n, 1, ...]."""

    @classmethod
    def allocate(
        cls,
        layers: Sequence[Layer],
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int = 0,
        dtype: torch.dtype,
        device: torch.device,
        is_shared: bool = False,
    ) -> PagedCache:
        """Allocate a cache filled with zeros.

        Attention also reads the unused tail of a block, under a mask. The tail must therefore contain finite values.
        See `clear`.

        Args:
            layers: What each layer of the model keeps.
            num_blocks: Number of KV blocks.
            block_size: Number of tokens in a block.
            num_slots: Number of slots for states.
            dtype: The dtype of keys and values.
            device: Where the cache is.
            is_shared: Whether layers of equal sizes use the same memory. The cache then has the right shapes only, for
                measurements in memory that may be too small for all layers.

        Raises:
            InputError: A chunk of a layer is not a multiple of a block.

        """
        for layer in layers:
            if isinstance(layer, KVLayer) and layer.chunk_size is not None and layer.chunk_size % block_size:
                raise InputError(
                    f"kv_block_size={block_size} must divide {layer.chunk_size}, the size of the chunks in "
                    "which this model computes attention"
                )
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (layer, 0 for keys or 1 for values) by size
        for index, layer in enumerate(layers):
            if isinstance(layer, KVLayer):
                for part, width in enumerate(layer.widths):
                    wanted.setdefault((layer.num_kv_heads, width), []).append((index, part))
        parts: dict[tuple[int, int], Tensor] = {}
        memory, blank = [], []
        for (heads, width), users in wanted.items():
            count = min(2, len(users)) if is_shared else len(users)
            memory.append(zeros((count, num_blocks + 2, block_size, heads, width), dtype, device))
            blank.append(zeros((count, 1, block_size, heads, width), dtype, device))
            # Consecutive users are the key and the value of one layer if both have the same width.
            parts |= {user: memory[-1][place % count] for place, user in enumerate(users)}
        states: dict[int, tuple[Tensor, ...]] = {}
        for index, layer in enumerate(layers):
            if isinstance(layer, SharedLayer):
                parts |= {(index, part): parts[layer.layer, part] for part in (0, 1)}
            elif isinstance(layer, StateLayer):
                alike = next((other for other in states if is_shared and layers[other] == layer), None)
                states[index] = (
                    tuple(
                        zeros((num_slots + 1, *shape), dtype, device)
                        for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
                    )
                    if alike is None
                    else states[alike]
                )
        keys, values = ({index: part for (index, own), part in parts.items() if own == which} for which in (0, 1))
        shared = frozenset(index for index, layer in enumerate(layers) if isinstance(layer, SharedLayer))
        return cls(keys, values, shared, states, num_blocks, num_slots, block_size, tuple(memory), tuple(blank))

    @property
    def padding(self) -> int:
        """Index of the padding block, which no sequence uses."""
        return self.num_blocks

    @property
    def scratch(self) -> int:
        """Index of the block for the surplus rows of a captured graph, because every row writes."""
        return self.num_blocks + 1

    @property
    def scratch_slot(self) -> int:
        """Index of the slot for the surplus rows of a captured graph."""
        return self.num_slots

    def clear(self, blocks: Tensor) -> None:
        """Zero blocks, int64 [n], that are about to be partly filled.

        An earlier sequence may have left NaN in the rest of a block. The mask gives these values the weight 0, but 0
        times NaN is NaN.
        """
        if not len(blocks):
            return
        for part, blank in zip(self.memory, self._blank, strict=True):  # all layers at once
            # Avoid index_fill_, which in CANN copies the whole tensor and writes the copy back.
            part.index_copy_(1, blocks, blank.expand(-1, len(blocks), *part.shape[2:]))
