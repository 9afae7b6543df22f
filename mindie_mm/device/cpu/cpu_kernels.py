"""Attention of decode steps on the CPU, without copies of the KV cache."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mindie_mm.device.kernels import Kernels, Rows

_MIN_BYTES = 2**19
"""Minimum size of the keys and values of the longest sequence for calling the attention of each sequence separately.

For smaller sequences, copying all of them into one batch costs less than the calls.
"""


class CPUKernels(Kernels):
    """The fused operators of the CPU."""

    has_attention: ClassVar[bool] = True
    joins_experts: ClassVar[bool] = False  # nothing waits, and layers can be replaced or quantized

    def attends(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> bool:
        count = len(rows.lengths)
        if query.shape[1] != count or None in rows.first_slots:  # one new token per sequence, and nothing to copy
            return False
        token_bytes = keys.shape[2] * (keys.shape[3] + values.shape[3]) * keys.element_size()
        return count == 1 or max(rows.lengths) * token_bytes >= _MIN_BYTES

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
        num_rows, num_kv_heads = query.shape[1], keys.shape[2]
        # Treat query heads that share a key-value head as several queries of one head, so that no keys are copied.
        queries = query.transpose(0, 1).reshape(num_rows, num_kv_heads, -1, query.shape[-1])
        sequences = zip(queries.split(1) if num_rows > 1 else (queries,), rows.first_slots, rows.lengths, strict=True)
        attended = []
        for row, first, length in sequences:
            assert first is not None
            key, value = _tokens(keys, first, length), _tokens(values, first, length)
            attended.append(scaled_dot_product_attention(row, key, value, scale=scaling))
        out = attended[0] if num_rows == 1 else torch.cat(attended)
        return out.reshape(num_rows, -1, values.shape[-1])


def _tokens(pages: Tensor, first: int, length: int) -> Tensor:
    """Return consecutive tokens of contiguous pages as a view, [1, kv_heads, length, head_dim]."""
    _, _, heads, width = pages.shape
    # This is one operator instead of four.
    offset = pages.storage_offset() + first * heads * width
    return pages.as_strided((1, heads, length, width), (0, width, heads * width, 1), offset)
