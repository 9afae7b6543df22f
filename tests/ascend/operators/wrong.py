"""Faults of fused operators that return wrong results without an error, as in some releases of CANN."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators import attention

_MASKED_KEYS = 512
_FRACTAL = 16
"""Number of columns that the format FRACTAL_NZ stores together."""


def faulty(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator with the fault that ASCEND_SIM_WRONG names for it, if any."""

    @wraps(operator)
    def run(**arguments: Any) -> Any:
        named = dict(one.rsplit(":", 1) for one in filter(None, os.environ.get("ASCEND_SIM_WRONG", "").split(",")))
        return _FAULTS[named[name]](operator, arguments) if name in named else operator(**arguments)

    return run


def _mean(operator: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Weight all visible keys equally."""
    return operator(**arguments | {"scale_value" if "scale_value" in arguments else "scale": 0.0})


def _mask_lost(operator: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Hide only keys among the first 512."""
    own = attention.Sparse.seen

    def seen(*given: Any) -> Tensor | None:
        found = own(*given)
        if found is not None:
            found[..., _MASKED_KEYS:] = True
        return found

    attention.Sparse.seen = seen  # type: ignore[method-assign]
    try:
        return operator(**arguments)
    finally:
        attention.Sparse.seen = own  # type: ignore[method-assign]


def _undefined_row(operator: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Do not write the last row of the result."""
    results = operator(**arguments)
    out = arguments["out"] if results is None else results[0] if isinstance(results, tuple | list) else results
    out.flatten(0, -2)[-1] = torch.nan
    return results


def _rest_read(operator: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Multiply the whole blocks of a sequence by weights that are 0 after its end, so that NaN remains NaN."""
    results = operator(**arguments)
    if arguments.get("block_table") is None:
        return results
    size, lengths = arguments["block_size"], arguments["actual_seq_lengths_kv"]
    for row, length in zip(arguments["block_table"], lengths, strict=True):
        if arguments["value"][row[: -(-length // size)].long()].isnan().any():
            results[0].fill_(torch.nan)
    return results


def _nz(operator: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Read new rows, whose format is ND, as if it were FRACTAL_NZ."""
    name = "updates" if "updates" in arguments else "key"
    rows = arguments[name]
    read = rows.contiguous().view(-1, len(rows), _FRACTAL).transpose(0, 1).reshape(rows.shape)
    return operator(**arguments | {name: read})


_FAULTS: Mapping[str, Callable[[Callable[..., Any], dict[str, Any]], Any]] = {
    "mean": _mean,
    "mask lost": _mask_lost,
    "undefined row": _undefined_row,
    "rest read": _rest_read,
    "nz": _nz,
}
