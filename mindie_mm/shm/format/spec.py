"""Shape and dtype of an array in shared memory. The wire format has a fixed table of dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

from mindie_mm.errors import InputError, LimitExceeded

MAX_DIMS = 6

# The index in this tuple is the code on the wire (docs/wire-format.md). Only append to it, up to 16 entries.
DTYPES: tuple[str, ...] = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "bool",
)
DTYPE_CODES = MappingProxyType({name: code for code, name in enumerate(DTYPES)})
ITEM_SIZES = (1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8, 1)
"""Bytes of one element, by dtype code."""


@cache
def ndarray() -> Any:
    """Return numpy.ndarray. The import is deferred because the operator's tools do not need numpy."""
    import numpy as np

    return np.ndarray


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of an array to allocate.

    Raises:
        InputError: The dtype is not in the table, or a size is not an integer of at least 1.
        LimitExceeded: The shape does not have 1 to 6 dimensions.

    """

    shape: tuple[int, ...]
    """Sizes of 1 to 6 dimensions, each at least 1."""
    dtype: str
    """Name of a numpy dtype: bool, [u]int8 to [u]int64 or float16 to float64."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_CODES:
            raise InputError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if not 1 <= len(self.shape) <= MAX_DIMS:
            raise LimitExceeded(f"shape {self.shape} has {len(self.shape)} dimensions; it must have 1 to {MAX_DIMS}")
        for size in self.shape:
            if type(size) is not int or size < 1:
                raise InputError(f"shape {self.shape} must contain only integers of at least 1")

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return prod(self.shape) * ITEM_SIZES[DTYPE_CODES[self.dtype]]
