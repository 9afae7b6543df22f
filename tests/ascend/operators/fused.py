"""Simulated operators of torch_npu, with the schemas that torch_npu registers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from tests.ascend.operators import (
    cache_writes,
    copies,
    experts,
    formats,
    fused_infer_attention,
    fusion_attention,
    layers,
    limits,
    quantized,
    wrong,
)
from tests.ascend.operators.launch import kernel

COMPUTED: Mapping[str, Callable[..., Any]] = {
    "npu::npu_fused_infer_attention_score": fused_infer_attention.fused_infer_attention_score,
    "npu::npu_fused_infer_attention_score.out": fused_infer_attention.fused_infer_attention_score_out,
    "npu::npu_fused_infer_attention_score_v2": fused_infer_attention.fused_infer_attention_score_v2,
    "npu::npu_prompt_flash_attention": fused_infer_attention.prompt_flash_attention,
    "npu::npu_incre_flash_attention": fused_infer_attention.incre_flash_attention,
    "npu::npu_fusion_attention": fusion_attention.fusion_attention,
    "npu::npu_fusion_attention_v3": fusion_attention.fusion_attention_v3,
    "atb::_npu_flash_attention_unpad": fused_infer_attention.flash_attention_unpad,
    "npu::npu_rms_norm": layers.rms_norm,
    "npu::npu_add_rms_norm": layers.add_rms_norm,
    "npu::npu_rotary_mul": layers.rotary_mul,
    "npu::npu_apply_rotary_pos_emb": layers.apply_rotary_pos_emb,
    "npu::npu_swiglu": layers.swiglu,
    "npu::npu_gelu": layers.gelu,
    "npu::npu_silu": layers.silu,
    "npu::fast_gelu": layers.fast_gelu,
    "npu::npu_fast_gelu": layers.fast_gelu,
    "npu::npu_scatter_nd_update_": cache_writes.scatter_nd_update_,
    "npu::npu_scatter_nd_update": cache_writes.scatter_nd_update,
    "npu::npu_scatter_pa_kv_cache": cache_writes.scatter_pa_kv_cache,
    "atb::_npu_reshape_and_cache": cache_writes.reshape_and_cache,
    "npu::npu_moe_init_routing_v2": experts.moe_init_routing_v2,
    "npu::npu_grouped_matmul": experts.grouped_matmul,
    "npu::npu_moe_token_unpermute": experts.moe_token_unpermute,
    "npu::npu_quantize": quantized.quantize,
    "npu::npu_dynamic_quant": quantized.dynamic_quant,
    "npu::npu_quant_matmul": quantized.quant_matmul,
}
"""Operators that the host computes in the device's memory."""

_ON_TENSORS: Mapping[str, Callable[..., Any]] = {
    "npu::_npu_dtype_cast": copies.dtype_cast,
    "npu::npu_dtype_cast": copies.dtype_cast,
    "npu::_npu_fused_infer_attention_score_get_max_workspace": fused_infer_attention.max_workspace,
    "npu::_npu_fused_infer_attention_score_infer_output": fused_infer_attention.infer_output,
    "npu::get_npu_format": formats.get_npu_format,
    "npu::npu_format_cast": formats.npu_format_cast,
    "npu::npu_format_cast.Tensor": formats.npu_format_cast_like,
    "npu::npu_format_cast_.acl_format": formats.npu_format_cast_,
    "npu::npu_format_cast_": formats.npu_format_cast_like_,
}
"""Operators that consist of torch operators on device tensors."""

_OLDER_WAY: Mapping[str, str] = {
    "npu_rms_norm": "aclnnRmsNorm",
    "npu_add_rms_norm": "aclnnAddRmsNorm",
    "npu_rotary_mul": "aclnnRotaryPositionEmbedding",
}
"""Operators that torch_npu runs by name through aclopCompileAndExecute if CANN does not have their function."""


def install(libraries: Mapping[str, torch.library.Library]) -> None:
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            namespace, _, rest = name.partition("::")
            implementation = _implementation(name) if namespace in {"npu", "atb"} else None
            if implementation is not None:
                libraries[namespace].impl(rest, implementation, key, allow_override=True)


@cache
def _implementation(name: str) -> Callable[..., Any] | None:
    """Return a replacement for torch_npu's kernel, or None if the kernel is not replaced."""
    namespace, _, rest = name.partition("::")
    if name in _ON_TENSORS:
        return _ON_TENSORS[name]
    if name not in COMPUTED:
        return _refusing(f"{rest} is not simulated") if namespace == "npu" else None
    ours = kernel(operator(name), wrong.faulty(rest, COMPUTED[name]), limits.of(name))
    if function := _OLDER_WAY.get(rest):
        torch_npus = _refusing(f"{function} or {function}GetWorkspaceSize not in libopapi.so")
    else:  # torch_npu's own kernel looks for the function in CANN's library, and reports that it is missing
        own = torch.library.get_kernel(operator(name), "PrivateUse1")
        torch_npus = partial(own.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1))

    # The dispatcher omits arguments that equal their default.
    defaults = {a.name: a.default_value for a in operator(name)._schema.arguments if a.has_default_value()}

    def launch(*args: Any, **kwargs: Any) -> Any:
        if _lacks(rest, args):
            return torch_npus(*args, **kwargs)
        _trace(rest, defaults | kwargs)
        return ours(*args, **kwargs)

    return launch


def _lacks(name: str, args: Sequence[Any]) -> bool:
    missing = os.environ.get("ASCEND_SIM_MISSING", "").split(",")
    return name in missing or any(f"{name}@{args[0].shape[-1]}" == one for one in missing if one.startswith(f"{name}@"))


def _trace(name: str, settings: Mapping[str, Any]) -> None:
    """Append a line to the trace, because the simulated operators do not call CANN."""
    if path := os.environ.get("ASCEND_SIM_TRACE"):
        text = " ".join(f"{key}={value}" for key, value in settings.items() if isinstance(value, str | int))
        with open(path, "a", encoding="utf-8") as trace:  # noqa: PTH123 - a single write keeps the line whole
            trace.write(f"{time.monotonic():.9f} {os.getpid()} {threading.get_native_id()} {name} {text}\n")


def _refusing(why: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(why)

    return refuse


def operator(name: str) -> Any:
    """Return the operator overload with the name `namespace::name[.overload]`."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
