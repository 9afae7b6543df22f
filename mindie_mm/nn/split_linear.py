"""Linear layers whose weights the ranks of torch.distributed share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, pad

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Function that gathers tensors of equal shapes. Its second name is deprecated since torch 2.13."""


def num_shares() -> int:
    """Return the number of ranks that share the weights. It is 1 unless this process is one of several ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Return whether this process is rank 0 of the ranks that share the weights."""
    return not dist.is_initialized() or dist.get_rank() == 0


def sum_on_all(values: Tensor) -> None:
    """Add up the values of all ranks, in place on every rank."""
    if num_shares() > 1:
        dist.all_reduce(values)


def is_same_on_all(digest: str) -> bool:
    """Return whether all ranks pass the same hexadecimal digest. Every rank must call this function."""
    if num_shares() == 1:
        return True
    number = int(digest[:15], 16)
    most = torch.tensor([number, -number])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist() == [number, -number]


def first_of(size: int) -> int:
    """Return the first of this rank's rows or columns of a weight. The last ranks may have fewer than the others."""
    return min(size, dist.get_rank() * -(-size // dist.get_world_size()))


@dataclass(frozen=True, slots=True)
class Split:
    """The share of a linear layer's weight that this rank has."""

    by_input: bool
    """True if the ranks have different inputs, and sum their products, instead of having different outputs."""
    start: int
    """First input or output of this rank."""
    size: int
    """Number of inputs or outputs on all ranks."""
    gathers: bool
    """True if each rank gets the outputs of all ranks."""


def split_layer(layer: nn.Linear, split: Split) -> None:
    """Let a linear layer, whose weight is this rank's share, combine its product with those of the other ranks."""
    vars(layer)["split"] = split
    layer.forward = partial(_multiply, layer)  # type: ignore[method-assign]


def split_of(layer: nn.Module) -> Split | None:
    """Return the share of a linear layer that this rank has, or None if it has the whole layer."""
    split: Split | None = vars(layer).get("split")
    return split


def change_product(layer: nn.Module, change: Callable[[Tensor, Tensor], None]) -> None:
    """Let `change` change this rank's product in a split layer in place, before the ranks combine their products.

    Args:
        layer: A layer that has a split.
        change: Function of this rank's input and product. The product has the bias unless the layer is split by inputs.

    """
    vars(layer)["change"] = change


def _multiply(layer: nn.Linear, rows: Tensor) -> Tensor:
    """Return the output of a split layer, or this rank's outputs if the next layer is split by inputs."""
    own: Any = vars(layer)
    split, change, weight, bias = own["split"], own.get("change"), layer.weight, layer.bias
    if split.by_input and rows.shape[-1] > weight.shape[1]:
        rows = rows.narrow(-1, split.start, weight.shape[1])
    out = linear(rows, weight, None if split.by_input else bias)
    if change is not None:
        change(rows, out)
    if split.by_input:
        dist.all_reduce(out)
        return out if bias is None else out.add_(bias)
    return _gathered(out, split.size) if split.gathers else out


def _gathered(out: Tensor, size: int) -> Tensor:
    """Return the outputs of all ranks, [..., size]. Those of this rank are `out`, [..., outputs]."""
    count = dist.get_world_size()
    padded = pad(out, (0, -(-size // count) - out.shape[-1])).contiguous()
    parts = padded.new_empty(count, *padded.shape)
    _gather(parts.view(-1), padded.view(-1))
    return parts.movedim(0, -2).flatten(-2)[..., :size]
