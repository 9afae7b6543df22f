"""What one array in shared memory looks like: its shape and its dtype, out of a fixed table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

from mindie_mm.errors import InputError, LimitExceeded

MAX_DIMS = 6

# The place in this tuple is the code on the wire (docs/wire-format.md): append only, at most 16.
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
    """numpy.ndarray, imported when it is first wanted: the operator's tools do without."""
    import numpy as np

    return np.ndarray


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array before it exists: 1 to 6 dimensions of at least 1 each, and a dtype of the wire's table."""

    shape: tuple[int, ...]
    dtype: str
    """A numpy dtype name: bool, [u]int8 to [u]int64, float16 to float64."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_CODES:
            raise InputError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if not 1 <= len(self.shape) <= MAX_DIMS:
            raise LimitExceeded(f"shape {self.shape} has {len(self.shape)} dimensions; 1 to {MAX_DIMS} are allowed")
        for size in self.shape:
            if type(size) is not int or size < 1:
                raise InputError(f"shape {self.shape} must consist of integers of at least 1")

    @property
    def nbytes(self) -> int:
        """Bytes that the array takes."""
        return prod(self.shape) * ITEM_SIZES[DTYPE_CODES[self.dtype]]
