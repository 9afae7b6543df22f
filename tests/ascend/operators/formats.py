"""Storage formats. A cast only records the format of a tensor: the bytes stay in the order of the format ND."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

ND, NZ = 2, 29

_formats: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def get_npu_format(input: Tensor) -> int:  # noqa: A002 - the schema's name
    found: int = _formats.get(input, ND)
    return found


def npu_format_cast(input: Tensor, acl_format: int, **_: Any) -> Tensor:  # noqa: A002 - the schema's name
    """Return a copy of the tensor with another format, or the tensor itself if it already has this format."""
    if get_npu_format(input) == acl_format:
        return input
    out = input.clone()
    _formats[out] = int(acl_format)
    return out


def npu_format_cast_like(input: Tensor, dst: Tensor, **_: Any) -> Tensor:  # noqa: A002 - the schema's name
    return npu_format_cast(input, get_npu_format(dst))


def npu_format_cast_(input: Tensor, acl_format: int, **_: Any) -> Tensor:  # noqa: A002 - the schema's name
    _formats[input] = int(acl_format)
    return input


def npu_format_cast_like_(input: Tensor, src: Tensor, **_: Any) -> Tensor:  # noqa: A002 - the schema's name
    return npu_format_cast_(input, get_npu_format(src))
