"""The class of a limit, and checks that many operators share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = Mapping[str, Any]
"""Arguments of a call by their names in the schema, including arguments that have their default value."""

HALF = (torch.float16, torch.bfloat16)
FLOAT = (torch.float32, *HALF)

DOCS = "torch_npu 2.13.0, _op_plugin_docs.py"
"""Source of limits: torch_npu's documentation in Chinese, in which operators are found by name."""

PARAMETER, TILING, KERNEL = 161002, 561002, 561103
"""Error codes of aclnn: the parameter check fails, the kernel's tiling refuses a parameter, or the launch fails."""

_DT = {
    torch.float64: "DT_DOUBLE",
    torch.float32: "DT_FLOAT",
    torch.float16: "DT_FLOAT16",
    torch.bfloat16: "DT_BFLOAT16",
    torch.int64: "DT_INT64",
    torch.int32: "DT_INT32",
    torch.int16: "DT_INT16",
    torch.int8: "DT_INT8",
    torch.uint8: "DT_UINT8",
    torch.bool: "DT_BOOL",
    torch.complex64: "DT_COMPLEX64",
    torch.complex128: "DT_COMPLEX128",
}
"""CANN's names of dtypes, from aclDataType in the Runtime API reference."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that applies to some operators."""

    operators: tuple[str, ...]
    source: str
    code: int
    refusals: Callable[[Arguments], Iterable[str]]
    """Function that yields the error messages for a call, in CANN's wording if it is known."""
    products: tuple[str, ...] = ("910B", "A3", "310P")
    """Products that have the limit."""
    below: tuple[int, int] | None = None
    """The first release of CANN without the limit. None if every release has it."""

    def holds(self) -> bool:
        """Return whether the product and the CANN of this process have the limit."""
        return product() in self.products and (self.below is None or cann() < self.below)


def product() -> str:
    """Return the product that ASCEND_SIM_SOC names: 910B (Atlas A2), A3 or 310P."""
    soc = os.environ.get("ASCEND_SIM_SOC", "")
    return "310P" if soc.startswith("Ascend310P") else "A3" if soc.startswith("Ascend910_93") else "910B"


def cann() -> tuple[int, int]:
    """Return the release of CANN that ASCEND_SIM_CANN names."""
    major, minor = (os.environ.get("ASCEND_SIM_CANN") or "9.1.0").split(".")[:2]
    return int(major), int(minor)


def dtypes(supported: Iterable[torch.dtype], *names: str) -> Callable[[Arguments], Iterator[str]]:
    """Return a check that each tensor among the arguments `names` has a supported dtype."""
    allowed = tuple(supported)

    def refusals(arguments: Arguments) -> Iterator[str]:
        for name in names:
            tensor = arguments.get(name)
            if isinstance(tensor, Tensor) and tensor.dtype not in allowed:
                listed = ",".join(_DT[dtype] for dtype in allowed)
                yield (
                    f"Tensor {name} not implemented for {_DT.get(tensor.dtype, tensor.dtype)}, "
                    f"should be in dtype support list [{listed},]."
                )

    return refusals


def same_dtype(first: str, *others: str) -> Callable[[Arguments], Iterator[str]]:
    def refusals(arguments: Arguments) -> Iterator[str]:
        for name in others:
            tensor = arguments.get(name)
            if isinstance(tensor, Tensor) and tensor.dtype != arguments[first].dtype:
                yield f"Tensor {name} expected dtype is {arguments[first].dtype} but found {tensor.dtype}."

    return refusals


def contiguous(*names: str) -> Callable[[Arguments], Iterator[str]]:
    def refusals(arguments: Arguments) -> Iterator[str]:
        for name in names:
            tensor = arguments.get(name)
            if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                yield f"Tensor {name} is not contiguous, strides {tensor.stride()}."

    return refusals
