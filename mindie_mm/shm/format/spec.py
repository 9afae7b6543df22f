"""Shape and dtype of an array in shared memory, and the fixed table of dtypes in the wire format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

from mindie_mm.errors import InputError, LimitExceeded

MAX_DIMS = 6

# A dtype's index in this tuple is its code in the wire format (docs/wire-format.md). Only append entries, up to 16.
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
"""Size of one element in bytes, by dtype code."""


@cache
def ndarray() -> Any:
    """Return numpy.ndarray. The import is deferred because the tools for operators do not need numpy."""
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
