"""Operators that run on the device's slow AI CPU instead of its AI cores, because of their dtype.

The dtypes are those of DAV_2201 (910B and A3) in hicann/ops-math and hicann/ops-nn, */op_api/*.cpp, as of August 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

_FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16))
_BYTES = frozenset((torch.int8, torch.uint8))
_I16, _I32, _I64, _BOOL = (frozenset((one,)) for one in (torch.int16, torch.int32, torch.int64, torch.bool))

CORES: Mapping[str, frozenset[torch.dtype]] = {
    **dict.fromkeys(("add", "sub", "mul", "eq"), _FLOATS | _BYTES | _I32 | _I64 | _BOOL),
    **dict.fromkeys(("ne", "lt"), _FLOATS | _BYTES | _I32 | _I64 | _BOOL),
    **dict.fromkeys(("le", "gt", "ge"), _FLOATS | _BYTES | _I32 | _I64),
    "where": _FLOATS | _BYTES | _I32 | _I64 | _BOOL,
    "floor_divide": _FLOATS | _BYTES | _I32,
    "fmod": _FLOATS | _BYTES | _I32,
    "masked_fill": _FLOATS | _I32 | _BOOL | {torch.int8},
    **dict.fromkeys(("maximum", "minimum"), _FLOATS | _I32 | _I64 | {torch.int8}),
    "clamp": _FLOATS | _I32 | _I64,
    **dict.fromkeys(("bitwise_or", "bitwise_xor"), _I16 | _I32 | _I64 | _BOOL),
    **dict.fromkeys(("sort", "argsort", "topk"), _FLOATS),
    "cumsum": _FLOATS | _I32,
    **dict.fromkeys(("argmax", "argmin"), _FLOATS | _I32 | _I64),
    **dict.fromkeys(("max", "min", "amax", "amin"), _FLOATS | _BYTES | _I32 | _I64),
    "prod": _FLOATS | _BYTES | _I32 | _I64,
    "gather": _FLOATS | _BYTES | _I16 | _I32 | _I64,
    "index": _FLOATS | _BYTES | _I32 | _I64 | _BOOL,
    "scatter": _FLOATS | _BYTES | _I32,
    "index_copy": _FLOATS | _I32 | _I64,
    "flip": _FLOATS - {torch.bfloat16} | _I16 | _I32 | _I64,
    "nonzero": _FLOATS | _BYTES | _BOOL,
    "pow": _FLOATS | _BYTES | _I32,
    **dict.fromkeys(("cummax", "cumprod", "searchsorted", "_unique2", "multinomial"), frozenset()),
}
"""Dtypes of values for which an operator has a kernel for AI cores. The others have one for all but float64."""

_FIRST = {"gather", "index", "scatter", "index_copy", "masked_fill"}
"""Operators of which only the first tensor contains values. The others contain indices or a mask."""
_COPIES = {"copy_", "clone", "contiguous", "cat", "fill_", "zero_"}


def runs_on_aicpu(operator: str, tensors: Sequence[Tensor]) -> bool:
    """Return whether a call to `operator` runs on the AI CPU. `tensors` are its tensors in the order of the schema."""
    namespace, _, name = operator.partition("::")
    if namespace != "aten" or name in _COPIES or not tensors:
        return False
    name = name if name.startswith("_") else name.removesuffix("_")
    values = tensors[:1] if name in _FIRST else tensors[1:] if name == "where" else tensors
    dtype = reduce(torch.promote_types, (one.dtype for one in values))
    return dtype == torch.float64 or (name in CORES and dtype not in CORES[name])
