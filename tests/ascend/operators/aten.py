"""Operators of torch. If torch_npu has a kernel for an operator, the host computes the operator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators import copies, counts, graphs, limits, order
from tests.ascend.operators.aliases import span
from tests.ascend.operators.launch import kernel

KEYS = ("PrivateUse1", "AutogradPrivateUse1")

_TORCH_NPUS = {
    *("empty.memory_format", "empty_strided", "empty_like", "resize_", "_local_scalar_dense"),
    *("is_pinned", "_pin_memory", "record_stream", "is_set_to"),
    *("scaled_dot_product_attention", "_fused_sdp_choice"),  # it calls npu_fusion_attention_v3, or plain operators
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
}
"""Operators that keep torch_npu's own kernels, which call the simulated CANN or other operators."""


def install(library: torch.library.Library) -> None:
    moves = copies.Copies()
    ours = {
        "copy_": moves.copy_,
        "_to_copy": moves.to_copy,
        "contiguous": copies.contiguous,
        "zeros": _zeros,
        "zero_": partial(_zero_, kernel(torch.ops.aten.zero_.default)),
    }
    for key in KEYS:
        for name, op in _registered(key):
            replacement = ours.get(name) or kernel(op, check=limits.of(op._schema.name))
            if op._schema.name in os.environ.get("ASCEND_SIM_MISSING", "").split(","):
                replacement = _refusing(op)
            if op._schema.name in os.environ.get("ASCEND_SIM_IDLE", "").split(","):
                replacement = _idle(replacement)
            library.impl(name, replacement, key, allow_override=True)


def _registered(key: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the operator of each torch operator for which torch_npu has a kernel."""
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        if namespace != "aten" or name in _TORCH_NPUS or not hasattr(torch.ops.aten, base):
            continue
        if not hasattr(getattr(torch.ops.aten, base), overload or "default"):
            continue  # torch_npu also registers some operators of its own in torch's namespace
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        if name == "contiguous" or not any(_is_view(argument) for argument in op._schema.arguments):
            yield name, op


def _refusing(op: Any) -> Callable[..., Any]:
    """Return a kernel that raises torch_npu's error for an operator that CANN lacks."""
    function = f"aclnn{op._schema.name.removeprefix('aten::').title()}"
    words = f"{function} or {function}GetWorkspaceSize not in libopapi.so, or libopapi.so not found."

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(words)

    return refuse


def _idle(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that does not write its result. The result is therefore uninitialized memory."""
    return lambda *arguments, **named: torch.empty_like(compute(*arguments, **named))


def _is_view(argument: Any) -> bool:
    return argument.alias_info is not None and not argument.alias_info.is_write


def _zeros(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """Zero a new tensor on the device, because building a cache of pages on the host first would be slow."""
    return torch.empty(size, dtype=dtype, device=device).zero_()


def _zero_(compute: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Zero a tensor without a copy of it, which would be slow for a cache of pages."""
    stream = order.begin(tensor.device)
    if graphs.mode(stream) or span(tensor) is None:
        return compute(tensor)
    counts.launched(stream, "aten::zero_", {"self": tensor}, [tensor], [tensor], None)
    order.publish_zeros(stream, tensor)
    return tensor
