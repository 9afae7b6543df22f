"""Attention of decode steps on the CPU, without copies of the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mindie_mm.device.kernels import Kernels, Rows


class CPUKernels(Kernels):
    """The fused operators of the CPU."""

    def attends(self, query: Tensor, keys: Tensor, values: Tensor, num_sequences: int, longest: int) -> bool:
        return query.shape[1] == num_sequences  # one new token per sequence

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
        num_rows, num_kv_heads = query.shape[1], keys.shape[2]
        # Treat query heads that share a key-value head as several queries of one head, so that no keys are copied.
        queries = query.transpose(0, 1).reshape(num_rows, 1, num_kv_heads, -1, query.shape[-1])
        pages = keys.flatten(0, 1), values.flatten(0, 1)
        attended = []
        for number, (row, length) in enumerate(zip(queries, rows.lengths, strict=True)):
            first = rows.first_slots[number]
            if first is not None:
                key, value = (page[first : first + length] for page in pages)
            else:
                blocks = rows.blocks[number, : -(-length // keys.shape[1])]
                key, value = (page.index_select(0, blocks).flatten(0, 1)[:length] for page in (keys, values))
            key, value = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
            attended.append(scaled_dot_product_attention(row, key, value, scale=scaling))
        return torch.cat(attended).reshape(num_rows, -1, values.shape[-1])
