"""The table of products and releases of CANN: operators, dtypes and widths that only some of them support.

The other limits hold for an Ascend 910B with the newest CANN. Other products and releases also have these limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from tests.ascend.operators.refusals import KERNEL, PARAMETER, TILING, Arguments, Limit

_FUSED = (
    *("npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"),
    *("npu::npu_prompt_flash_attention", "npu::npu_incre_flash_attention"),
)
_TRAINING = ("npu::npu_fusion_attention", "npu::npu_fusion_attention_v3")
_NORMS = ("npu::npu_rms_norm", "npu::npu_add_rms_norm")
_ROTARY = ("npu::npu_rotary_mul", "npu::npu_apply_rotary_pos_emb")
_SCATTER = ("npu::npu_scatter_nd_update_", "npu::npu_scatter_nd_update")
_PAGES = "op-plugin 517f2e7d0, docs/zh/custom_APIs"


def _no_product(_: Arguments) -> Iterator[str]:
    yield "the operator does not support this product."


def _no_bfloat16(given: Arguments) -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            yield f"Tensor {name} not implemented for DT_BFLOAT16."


def _dtypes(*names: str, allowed: Iterable[torch.dtype]) -> Callable[[Arguments], Iterator[str]]:
    found = frozenset(allowed)

    def refusals(given: Arguments) -> Iterator[str]:
        for name in names:
            if given[name].dtype not in found:
                yield f"Tensor {name} not implemented for {given[name].dtype}."

    return refusals


def _swiglu(given: Arguments) -> Iterator[str]:
    if (width := given["input"].shape[-1]) % 32:
        yield f"the last axis of x is {width}, it must be a multiple of 32."


def _packed_width(given: Arguments) -> Iterator[str]:
    query, value = given["query"], given["value"]
    if given["input_layout"] == "TND" and given.get("block_table") is None:
        widths = query.shape[-1], value.shape[-1]
        if widths not in {(192, 192), (192, 128)}:
            yield f"When layout is TND, queryD({widths[0]}) must be 192, and valueD({widths[1]}) 192 or 128."


def _packed_pages(given: Arguments) -> Iterator[str]:
    if given["input_layout"] == "TND" and given.get("block_table") is not None:
        yield "When layout is TND, page attention is not supported."


def _training_packed(given: Arguments) -> Iterator[str]:
    if given["input_layout"] == "TND":
        yield "the layout TND does not support this product."


LIMITS = (
    Limit(_FUSED, f"{_PAGES}: A2 and A3", KERNEL, _no_product, products=("310P",)),
    Limit(_FUSED, "issue 8045 of vllm-project/vllm-ascend: CANN 8.3.RC1", TILING, _packed_width, below=(8, 5)),
    Limit(_FUSED, "issue 4373 of vllm-project/vllm-ascend: CANN 8.3", TILING, _packed_pages, below=(8, 5)),
    Limit(_TRAINING, "hicann/ops-transformer, aclnnFlashAttentionScore: 310P", KERNEL, _no_product, products=("310P",)),
    Limit(
        _TRAINING,
        "hicann/ops-transformer c29bc1069, aclnnFlashAttentionVarLenScore: A3; yes in the pages of 2026",
        KERNEL,
        _training_packed,
        products=("A3",),
        below=(9, 0),
    ),
    Limit(
        ("npu::npu_moe_init_routing_v2", "npu::npu_moe_token_unpermute"),
        f"{_PAGES}, of both operators: A2 and A3",
        KERNEL,
        _no_product,
        products=("310P",),
    ),
    Limit(("npu::npu_scatter_pa_kv_cache",), f"{_PAGES}: A2 and A3", KERNEL, _no_product, products=("310P",)),
    Limit(
        ("aten::index_copy", "aten::index_copy_"),
        "hicann/ops-nn e5c3fa932, index/scatter_update/docs: A2 and A3",
        KERNEL,
        _no_product,
        products=("310P",),
    ),
    Limit(
        _SCATTER,
        f"{_PAGES}, npu_scatter_nd_update_: 310P",
        PARAMETER,
        _dtypes("input", "updates", allowed=(torch.float32, torch.float16, torch.bool)),
        products=("310P",),
    ),
    Limit(("npu::npu_swiglu",), "vllm-ascend 182b75ea84, _310p", PARAMETER, _swiglu, products=("310P",)),
    Limit(
        (
            *_NORMS,
            "npu::npu_rotary_mul",
            "npu::npu_apply_rotary_pos_emb",
            "npu::npu_swiglu",
            "aten::mm",
            "aten::matmul",
        ),
        f"{_PAGES}; vllm-ascend 182b75ea84, _310p: float16 only",
        PARAMETER,
        _no_bfloat16,
        products=("310P",),
    ),
)
