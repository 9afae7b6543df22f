"""Operators that write keys and values into the pages of a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    """Set input[indices[i]] = updates[i]. The last axis of `indices` selects positions in the first axes of `input`."""
    where = indices.long().unbind(-1)
    for axis, places in enumerate(where):
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < input.shape[axis]:
            # The documentation forbids such an index, because the device would write to an arbitrary address.
            raise RuntimeError(
                f"indices go from {int(places.min())} to {int(places.max())} in {input.shape[axis]} rows"
            )
    input[where] = updates
    return input


def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    return scatter_nd_update_(input.clone(), indices, updates)


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **unused: Any,
) -> None:
    """Write rows [T, heads, dim] to slots of pages.

    Pages are [blocks, block_size, heads, dim], or have the NZ format.
    """
    if any(extra is not None for extra in unused.values()):
        raise NotImplementedError("compressed caches are not simulated")
    slots = slot_mapping.long()
    for new, pages in ((key, key_cache), (value, value_cache)):
        if cache_mode == "PA_NZ":  # [blocks, heads * dim / 16, block_size, 16]
            rows = new.flatten(1).unflatten(1, (pages.shape[1], pages.shape[3]))
            pages[slots // pages.shape[2], :, slots % pages.shape[2]] = rows
        else:
            pages.view(-1, *pages.shape[2:])[slots] = new


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """Write rows [T, heads, dim] to slots of pages [blocks, block_size, heads, dim]."""
    scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_indices, cache_mode="Norm")


def written_rows(operator: str, given: Mapping[str, Any]) -> dict[str, tuple[int, Tensor]]:
    """Return which rows an operator writes: for arguments, the number of axes that form the rows, and their indices.

    `given` are the arguments by name, on the host. Other arguments may change anywhere.
    """
    name = operator.partition("::")[2]
    if name == "npu_scatter_nd_update_":
        axes = given["indices"].shape[-1]
        shape = given["input"].shape[:axes]
        rows = torch.zeros(given["indices"].shape[:-1], dtype=torch.int64)
        for length, places in zip(shape, given["indices"].long().unbind(-1), strict=True):
            rows = rows * length + places
        return {"input": (axes, rows.flatten())}
    if name == "index_copy_" and given["self"].dim():
        axis = given["dim"] % given["self"].dim()
        before = torch.arange(math.prod(given["self"].shape[:axis])).unsqueeze(1)
        rows = before * given["self"].shape[axis] + given["index"].long()
        return {"self": (axis + 1, rows.flatten())}
    slots = given.get("slot_mapping", given.get("slot_indices"))
    if slots is not None and (name == "_npu_reshape_and_cache" or given.get("cache_mode") == "Norm"):
        rows = slots.long().flatten()
        return dict.fromkeys(("key_cache", "value_cache"), (2, rows[rows >= 0]))
    return {}
