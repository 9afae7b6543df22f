"""Matrices of integers. Each int32 packs several integers."""

from __future__ import annotations

import torch
from torch import Tensor


def unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the unsigned numbers in the columns of a matrix of int32, the first in the lowest bits.

    Args:
        packed: int32 [rows, columns].
        bits: Bits of a number. It must divide 32.
        count: Number of numbers in a row. The last int32 of a row may have fewer numbers.

    Returns:
        int16 [rows, count].

    Raises:
        ValueError: The number of columns does not fit.

    """
    if packed.shape[1] != (needed := -(-count * bits // 32)):
        raise ValueError(
            f"{count} numbers of {bits} bits are packed into {packed.shape[1]} columns; they need {needed}"
        )
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (packed.unsqueeze(2) >> shifts) & (2**bits - 1)
    own: Tensor = numbers.flatten(1)[:, :count].to(torch.int16)
    return own
