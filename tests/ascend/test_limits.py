"""Tests for the limits of an Ascend 910B. For each limit, one call exceeds the limit and another just reaches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ascend.operators.limits import LIMITS, Refused

HALF, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def moved(value: Any, npu: torch.device) -> Any:
    """Move a tensor to the device, including the gaps in its memory. Return any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
    return whole.to(npu).as_strided(value.size(), value.stride(), value.storage_offset())


def fused(npu: torch.device, **changes: Any) -> Any:
    """Decode two packed sequences over pages of 128 tokens, with `changes` to the arguments."""
    given = {
        "query": torch.zeros(2, 4, 128, dtype=HALF),
        "key": torch.zeros(3, 128, 256, dtype=HALF),
        "value": torch.zeros(3, 128, 256, dtype=HALF),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [130, 5],
        "block_table": torch.tensor([[0, 1], [2, 2]], dtype=torch.int32),
        "block_size": 128,
        "sparse_mode": 3,
        "atten_mask": TRIANGLE,
    } | changes
    given = {name: moved(value, npu) for name, value in given.items()}
    rows = [given.pop(name) for name in ("query", "key", "value")]
    return torch.ops.npu.npu_fused_infer_attention_score(*rows, **{k: v for k, v in given.items() if v is not None})


def prefill(npu: torch.device, **changes: Any) -> Any:
    """Prefill one sequence with 6 queries and 9 keys, in a layout with a batch axis."""
    rows = {"query": torch.zeros(1, 6, 64, dtype=HALF)} | {
        name: torch.zeros(1, 9, 32, dtype=HALF) for name in ("key", "value")
    }
    none = dict.fromkeys(("block_table", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv"))
    return fused(npu, **{**rows, **none, "block_size": 0, "sparse_mode": 0, "input_layout": "BSH"} | changes)


def unpaged(npu: torch.device, **changes: Any) -> Any:
    """Compute attention of packed queries over packed keys, without pages."""
    rows = {name: torch.zeros(2, 4, 128, dtype=HALF) for name in ("query", "key", "value")}
    settings = {"num_key_value_heads": 4, "block_table": None, "block_size": 0, "actual_seq_lengths_kv": [1, 2]}
    return fused(npu, **{**rows, **settings} | changes)


def training(npu: torch.device, **changes: Any) -> Any:
    given = {name: torch.zeros(5, 4, 20, dtype=FULL) for name in ("query", "key", "value")}
    given |= {"head_num": 4, "input_layout": "TND", "actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5]} | changes
    given = {name: moved(value, npu) for name, value in given.items()}
    return torch.ops.npu.npu_fusion_attention(**given)


def unpadded(npu: torch.device, **changes: Any) -> Any:
    """Compute attention of packed rows with the operator of ATB, whose lengths are on the host."""
    given = {name: zeros(5, 4, 64) for name in ("query", "key", "value", "out")} | changes
    lengths = given.pop("seq_len", torch.tensor([2, 3], dtype=torch.int32))
    query, key, value, out = (moved(given[name], npu) for name in ("query", "key", "value", "out"))
    return torch.ops.atb._npu_flash_attention_unpad(query, key, value, lengths, 0.125, 4, 4, out)


def plain(operator: str) -> Callable[..., Any]:
    """Return a function that calls the operator with positional arguments."""

    def launch(npu: torch.device, *arguments: Any) -> Any:
        namespace, name = operator.split("::")
        return getattr(getattr(torch.ops, namespace), name)(*(moved(value, npu) for value in arguments))

    return launch


def routed(npu: torch.device, **changes: Any) -> Any:
    """Sort six rows of two tokens by expert."""
    given: dict[str, Any] = {"x": zeros(2, 8), "expert_idx": torch.tensor([[0, 1, 3], [0, 2, 3]], dtype=torch.int32)}
    given |= {"active_num": 6, "expert_num": 4, "active_expert_range": [0, 4], "quant_mode": -1, "drop_pad_mode": 0}
    given |= {"expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    given = {name: moved(value, npu) for name, value in (given | changes).items()}
    return torch.ops.npu.npu_moe_init_routing_v2(**given)


def grouped(npu: torch.device, **changes: Any) -> Any:
    """Multiply six rows by the weights of three experts."""
    given: dict[str, Any] = {"x": zeros(6, 8), "weight": zeros(3, 8, 16), "group_list": torch.tensor([2, 0, 4])}
    given |= {"group_list_type": 1, "group_type": 0, "split_item": 2}
    given = {name: moved(value, npu) for name, value in (given | changes).items()}
    return torch.ops.npu.npu_grouped_matmul([given.pop("x")], [given.pop("weight")], **given)


def unpermuted(npu: torch.device, **changes: Any) -> Any:
    """Add the rows of two tokens."""
    given: dict[str, Any] = {"permuted_tokens": zeros(6, 8), "sorted_indices": torch.arange(6, dtype=torch.int32)}
    given |= {"probs": zeros(2, 3)}
    given = {name: moved(value, npu) for name, value in (given | changes).items()}
    return torch.ops.npu.npu_moe_token_unpermute(**given)


def quantized(npu: torch.device, **changes: Any) -> Any:
    """Round three rows with constants."""
    given: dict[str, Any] = {"input": zeros(3, 8), "scales": zeros(8), "zero_points": zeros(8)}
    given = {name: moved(value, npu) for name, value in (given | changes).items()}
    return torch.ops.npu.npu_quantize(*given.values(), torch.qint8, -1, False)


def rounded(npu: torch.device, **changes: Any) -> Any:
    """Round three rows, each by its largest value."""
    given = {name: moved(value, npu) for name, value in ({"input": zeros(3, 8)} | changes).items()}
    return torch.ops.npu.npu_dynamic_quant(**given)


def integers(npu: torch.device, **changes: Any) -> Any:
    """Multiply three rows of int8."""
    given: dict[str, Any] = {"x1": zeros(3, 8, dtype=torch.int8), "x2": zeros(8, 16, dtype=torch.int8)}
    given |= {"scale": zeros(16, dtype=FULL), "output_dtype": torch.bfloat16}
    given = {name: moved(value, npu) for name, value in (given | changes).items()}
    return torch.ops.npu.npu_quant_matmul(**given)


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


MM, BMM, ADDMM, SOFTMAX = (plain(f"aten::{name}") for name in ("mm", "bmm", "addmm", "softmax"))
NORM, ADD_NORM, ROTARY = (plain(f"npu::npu_{name}") for name in ("rms_norm", "add_rms_norm", "rotary_mul"))
IN_PLACE, SWIGLU = plain("npu::npu_apply_rotary_pos_emb"), plain("npu::npu_swiglu")
SCATTER, SLOTS = plain("npu::npu_scatter_nd_update_"), plain("npu::npu_scatter_pa_kv_cache")
CONV, LAYER_NORM, GELU, SILU = (plain(f"aten::{n}") for n in ("conv2d", "native_layer_norm", "gelu", "silu"))
SDPA = plain("aten::scaled_dot_product_attention")
ROWS = (zeros(2, 4, 3, 16), *(zeros(2, 4, 5, 16),) * 2)
BNSD = dict(zip(("query", "key", "value"), ROWS, strict=True)) | {"input_layout": "BNSD"}
INDEX = torch.zeros(2, 1, dtype=torch.int64)
PAGES = zeros(2, 8, 2, 16)
SLOT = torch.zeros(2, dtype=torch.int32)

REFUSED: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "products of float64": (MM, (zeros(2, 2, dtype=DOUBLE),) * 2, "self not implemented for DT_DOUBLE"),
    "products of int64": (MM, (zeros(2, 2, dtype=torch.int64),) * 2, "self not implemented for DT_INT64"),
    "batched products of float64": (BMM, (zeros(1, 2, 2, dtype=DOUBLE),) * 2, "DT_DOUBLE"),
    "products and a sum of float64": (ADDMM, (zeros(2, 2, dtype=DOUBLE),) * 3, "mat1 not implemented for DT_DOUBLE"),
    "softmax of int64": (SOFTMAX, (zeros(2, 2, dtype=torch.int64), -1), "self not implemented for DT_INT64"),
    "attention in float32": (prefill, {n: zeros(1, 6, 64, dtype=FULL) for n in ("query",)}, "query not implemented"),
    "keys of another dtype": (prefill, {"key": zeros(1, 9, 32, dtype=torch.float16)}, "key expected dtype"),
    "a mask of floats": (prefill, {"atten_mask": zeros(1, 1, 6, 9, dtype=FULL), "sparse_mode": 1}, "atten_mask not"),
    "rows of floats for ATB": (unpadded, {"query": zeros(5, 4, 64, dtype=FULL)}, "query not implemented"),
    "strided rows for ATB": (unpadded, {"key": zeros(4, 5, 64).transpose(0, 1)}, "key is not contiguous"),
    "lengths that do not fit for ATB": (unpadded, {"seq_len": torch.tensor([2], dtype=torch.int32)}, "sums to 2"),
    "a convolution of float64": (CONV, (zeros(1, 2, 4, 4, dtype=DOUBLE), zeros(3, 2, 2, 2, dtype=DOUBLE)), "DT_DOUBLE"),
    "a layer norm of float64": (
        LAYER_NORM,
        (zeros(2, 4, dtype=DOUBLE), (4,), *(zeros(4, dtype=DOUBLE),) * 2, 1e-5),
        "DT_DOUBLE",
    ),
    "a GELU of float64": (GELU, (zeros(2, dtype=DOUBLE),), "DT_DOUBLE"),
    "a SiLU of float64": (SILU, (zeros(2, dtype=DOUBLE),), "DT_DOUBLE"),
    "a mask with one row for all": (
        training,
        {**BNSD, "atten_mask": zeros(2, 1, 1, 5, dtype=torch.bool)},
        "unsupported atten_mask shape",
    ),
    "a mask of three axes": (SDPA, (*ROWS, zeros(2, 3, 5, dtype=torch.bool)), "unsupported atten_mask shape"),
    "rows with gaps": (fused, {"query": zeros(2, 8, 128)[:, ::2]}, "query is not contiguous"),
    "a layout": (prefill, {"input_layout": "SBH"}, "inputLayout SBH"),
    "heads that do not share": (fused, {"num_heads": 4, "num_key_value_heads": 3}, "must be a multiple"),
    "heads that are not the query's": (fused, {"num_heads": 2}, "numHeads"),
    "a head of 20": (prefill, {n: zeros(1, 9, 20 * h) for n, h in (("query", 4), ("key", 2), ("value", 2))}, "headDim"),
    "a head of 528": (
        prefill,
        {n: zeros(1, 9, 528 * h) for n, h in (("query", 4), ("key", 2), ("value", 2))},
        "headDim",
    ),
    "a causal mode without its mask": (prefill, {"sparse_mode": 3}, "attenMask must be given"),
    "a mask of its own for it": (
        prefill,
        {"sparse_mode": 3, "atten_mask": TRIANGLE[:6, :9].contiguous()},
        "2048, 2048",
    ),
    "a mode": (prefill, {"sparse_mode": 5}, "sparseMode"),
    "a packed head of 96": (unpaged, {n: zeros(2, 4, 96) for n in ("query", "key", "value")}, "192/128/64"),
    "packed rows too many": (fused, {"query": zeros(3, 4, 128)}, "queryT"),
    "packed rows without lengths": (fused, {"actual_seq_lengths": None}, "must be given"),
    "packed rows with a mask of their own": (unpaged, {"sparse_mode": 1}, "must be 0 without a mask"),
    "more queries than keys": (unpaged, {"actual_seq_lengths": [2, 2]}, "more queries than keys"),
    "a packed window without its mask": (unpaged, {"sparse_mode": 4, "atten_mask": None}, "attenMask"),
    "a block of 100": (fused, {"block_size": 100, **{n: zeros(3, 100, 256) for n in ("key", "value")}}, "blockSize"),
    "a packed block of 256": (
        fused,
        {"block_size": 256, **{n: zeros(3, 256, 256) for n in ("key", "value")}},
        "blockSize",
    ),
    "a table of int64": (fused, {"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "blockTable must be int32"),
    "a table too narrow": (fused, {"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "columns"),
    "a table too short": (fused, {"block_table": torch.zeros(1, 2, dtype=torch.int32)}, "rows"),
    "a cache by heads": (fused, {n: zeros(3, 2, 128, 128) for n in ("key", "value")}, "must be \\(blocks"),
    "a single row over too many keys": (
        prefill,
        {
            "query": zeros(1, 1, 16),
            **{n: zeros(1, 1, 16).expand(1, 262145, 16).contiguous() for n in ("key", "value")},
            "num_heads": 1,
            "num_key_value_heads": 1,
        },
        "262144",
    ),
    "training in int8": (training, {n: zeros(5, 4, 20, dtype=torch.int8) for n in ("query",)}, "DT_INT8"),
    "training in two dtypes": (training, {"key": zeros(5, 4, 20)}, "expected dtype"),
    "a mask of int8 in training": (training, {"atten_mask": zeros(5, 5, dtype=torch.int8)}, "DT_INT8"),
    "a layout in training": (training, {"input_layout": "NTD"}, "inputLayout"),
    "heads in training": (training, {"head_num": 2}, "head_num"),
    "a head of 769 in training": (
        training,
        {n: zeros(5, 4, 769, dtype=FULL) for n in ("query", "key", "value")},
        "headDim",
    ),
    "lengths in training": (training, {"actual_seq_qlen": [2, 6]}, "beyond 5"),
    "a norm of float64": (NORM, (zeros(2, 8, dtype=DOUBLE), zeros(8, dtype=DOUBLE)), "DT_DOUBLE"),
    "a norm in two dtypes": (NORM, (zeros(2, 8), zeros(8, dtype=FULL)), "gamma expected dtype"),
    "a norm of other axes": (NORM, (zeros(2, 8), zeros(4)), "last axes"),
    "a sum's norm of float64": (ADD_NORM, (*(zeros(2, 8, dtype=DOUBLE),) * 2, zeros(8, dtype=DOUBLE)), "DT_DOUBLE"),
    "a sum's norm in two dtypes": (ADD_NORM, (zeros(2, 8), zeros(2, 8), zeros(8, dtype=FULL)), "expected dtype"),
    "a rotation of float64": (ROTARY, (zeros(1, 2, 2, 4, dtype=DOUBLE),) * 3, "DT_DOUBLE"),
    "a rotation of three axes": (ROTARY, (zeros(2, 2, 4),) * 3, "four axes"),
    "a rotation of 896": (ROTARY, (zeros(1, 1, 1, 896),) * 3, "less than 896"),
    "a rotation by other rows": (ROTARY, (zeros(1, 2, 3, 4), *(zeros(1, 3, 3, 4),) * 2), "must be as x"),
    "a rotation of quarters": (ROTARY, (*(zeros(1, 2, 2, 4),) * 3, "quarter"), "rotary_mode"),
    "pairs rotated by heads": (ROTARY, (*(zeros(1, 2, 2, 4),) * 3, "interleave"), "11SD"),
    "a rotation of 1000 heads": (ROTARY, (zeros(1, 1000, 2, 4), *(zeros(1, 1, 2, 4),) * 2), "B and N must be less"),
    "a thousand pairs rotated": (
        ROTARY,
        (zeros(40, 25, 2, 4), *(zeros(1, 1, 2, 4),) * 2, "interleave"),
        "B \\* N must",
    ),
    "a rotation in place of float64": (IN_PLACE, (zeros(1, 2, 2, 64, dtype=DOUBLE),) * 4, "DT_DOUBLE"),
    "a rotation in place of 32": (IN_PLACE, (zeros(1, 2, 1, 32),) * 4, "128 or 64"),
    "an activation of float64": (SWIGLU, (zeros(2, 4, dtype=DOUBLE),), "DT_DOUBLE"),
    "a scatter of float64": (SCATTER, (zeros(4, 2, dtype=DOUBLE), INDEX, zeros(2, 2, dtype=DOUBLE)), "DT_DOUBLE"),
    "a scatter by int16": (SCATTER, (zeros(4, 2), INDEX.short(), zeros(2, 2)), "indices not implemented for DT_INT16"),
    "a scatter of two dtypes": (SCATTER, (zeros(4, 2), INDEX, zeros(2, 2, dtype=FULL)), "updates expected dtype"),
    "a scatter of other shapes": (SCATTER, (zeros(4, 2), INDEX, zeros(3, 2)), "updates"),
    "a scatter by one axis": (SCATTER, (zeros(4, 2), INDEX[:, 0], zeros(2, 2)), "two axes"),
    "rows with gaps to the cache": (
        SLOTS,
        (zeros(2, 4, 16)[:, ::2], zeros(2, 2, 16), PAGES, PAGES, SLOT),
        "contiguous",
    ),
    "rows of another dtype to it": (
        SLOTS,
        (zeros(2, 2, 16, dtype=FULL), zeros(2, 2, 16), PAGES, PAGES, SLOT),
        "expected",
    ),
    "routed float64": (routed, {"x": zeros(2, 8, dtype=DOUBLE)}, "DT_DOUBLE"),
    "experts of int64": (routed, {"expert_idx": torch.zeros(2, 3, dtype=torch.int64)}, "expert_idx not implemented"),
    "experts of one token": (routed, {"expert_idx": torch.zeros(1, 3, dtype=torch.int32)}, "as many rows"),
    "sums of rows of experts": (routed, {"expert_tokens_num_type": 0}, "must be 1 or 2"),
    "experts that drop rows": (routed, {"drop_pad_mode": 1}, "drop_pad_mode"),
    "rows quantized by a given scale": (routed, {"quant_mode": 0}, "quant_mode"),
    "scales of routed rows in float16": (routed, {"scale": zeros(2)}, "must be float32"),
    "fewer rows than routed": (routed, {"active_num": 5}, "active_num"),
    "experts beyond their number": (routed, {"active_expert_range": [2, 5]}, "active_expert_range"),
    "grouped products of two dtypes": (grouped, {"weight": zeros(3, 8, 16, dtype=FULL)}, "weight expected dtype"),
    "grouped products of int8 without scales": (
        grouped,
        {"x": zeros(6, 8, dtype=torch.int8), "weight": zeros(3, 8, 16, dtype=torch.int8)},
        "both scales",
    ),
    "groups of int32": (grouped, {"group_list": torch.tensor([2, 0, 4], dtype=torch.int32)}, "must be int64"),
    "fewer groups than weights": (grouped, {"group_list": torch.tensor([2, 4])}, "group_list has 2 groups"),
    "the size of one group": (
        grouped,
        {"group_list": torch.tensor([6]), "weight": zeros(1, 8, 16)},
        "does not support 1 groups",
    ),
    "groups of columns": (grouped, {"group_type": 2}, "group_type must be 0"),
    "grouped products of other widths": (grouped, {"weight": zeros(3, 16, 8)}, "weight"),
    "grouped products of transposed rows": (grouped, {"x": zeros(8, 6).t()}, "must not be transposed"),
    "grouped products too wide": (grouped, {"weight": zeros(3, 8, 65536)}, "less than 65536"),
    "sums of float64": (unpermuted, {"permuted_tokens": zeros(6, 8, dtype=DOUBLE)}, "DT_DOUBLE"),
    "sums by int16": (unpermuted, {"sorted_indices": torch.arange(6, dtype=torch.int16)}, "sorted_indices not"),
    "sums with too few weights": (unpermuted, {"probs": zeros(2, 2)}, "probs"),
    "a slot too few": (SLOTS, (zeros(2, 2, 16), zeros(2, 2, 16), PAGES, PAGES, SLOT[:1]), "slot_mapping"),
    "rounding of float64": (
        quantized,
        {name: zeros(*shape, dtype=DOUBLE) for name, shape in (("input", (3, 8)), ("scales", (8,)))},
        "input not implemented for DT_DOUBLE",
    ),
    "rounding by constants of another dtype": (quantized, {"scales": zeros(8, dtype=FULL)}, "must have the dtype of"),
    "rounding by zero points of another shape": (quantized, {"zero_points": zeros(1)}, "the shape of scales"),
    "rounding of float32 by rows": (rounded, {"input": zeros(3, 8, dtype=FULL)}, "input not implemented for DT_FLOAT"),
    "rounding of one axis": (rounded, {"input": zeros(8)}, "at least two axes"),
    "products of int8 with floats": (integers, {"x2": zeros(8, 16)}, "x2 not implemented for"),
    "scales of rows in float16": (integers, {"pertoken_scale": zeros(3)}, "pertoken_scale not implemented"),
    "products of transposed int8": (integers, {"x1": zeros(8, 3, dtype=torch.int8).t()}, "x1 is not contiguous"),
    "products of int8 of other widths": (integers, {"x2": zeros(16, 8, dtype=torch.int8)}, "must be"),
    "products of int8 too wide": (
        integers,
        {"x2": zeros(8, 65536, dtype=torch.int8), "scale": zeros(1, dtype=FULL)},
        "at most 65535",
    ),
    "scales of other outputs": (integers, {"scale": zeros(3, dtype=FULL)}, "must have 1 or 16 numbers"),
    "float16 with a float bias": (
        integers,
        {"output_dtype": torch.float16, "bias": zeros(16, dtype=FULL)},
        "not supported together",
    ),
    "products of int8 in float32": (integers, {"output_dtype": FULL}, "not supported together"),
}

TAKEN: dict[str, tuple[Callable[..., Any], Any]] = {
    "a convolution": (CONV, (zeros(1, 2, 4, 4), zeros(3, 2, 2, 2))),
    "a layer norm of float32": (LAYER_NORM, (zeros(2, 4, dtype=FULL), (4,), *(zeros(4, dtype=FULL),) * 2, 1e-5)),
    "a GELU": (GELU, (zeros(2),)),
    "a SiLU": (SILU, (zeros(2),)),
    "products of float32": (MM, (zeros(2, 2, dtype=FULL),) * 2),
    "softmax of float64": (SOFTMAX, (zeros(2, 2, dtype=DOUBLE), -1)),
    **{
        f"a mask {[*shape]}": (SDPA, (*ROWS, torch.ones(shape, dtype=torch.bool)))
        for shape in ((2, 4, 3, 5), (2, 1, 3, 5), (1, 1, 3, 5), (3, 5), (2, 1, 1, 5))
    },
    "a sum of float64": (plain("aten::add"), (zeros(2, dtype=DOUBLE),) * 2),
    "pages": (fused, {}),
    "packed keys": (unpaged, {}),
    "a packed head of 64": (unpaged, {n: zeros(2, 4, 64) for n in ("query", "key", "value")}),
    "packed heads of 192 and 128": (
        unpaged,
        {"query": zeros(2, 4, 192), "key": zeros(2, 4, 192), "value": zeros(2, 4, 128)},
    ),
    "a batch axis": (prefill, {}),
    "a head of 512": (prefill, {n: zeros(1, 9, 512 * h) for n, h in (("query", 4), ("key", 2), ("value", 2))}),
    "a triangle": (prefill, {"sparse_mode": 2, "atten_mask": TRIANGLE.view(1, 1, 2048, 2048)}),
    "a mask of its own": (prefill, {"sparse_mode": 1, "atten_mask": zeros(1, 1, 6, 9, dtype=torch.bool)}),
    "a packed block of 16": (
        fused,
        {"block_size": 16, "block_table": torch.zeros(2, 9, dtype=torch.int32)}
        | {n: zeros(3, 16, 256) for n in ("key", "value")},
    ),
    "training in float32, a head of 20": (training, {}),
    "a norm": (NORM, (zeros(2, 8), zeros(8))),
    "a rotation of 1000 tokens": (ROTARY, (zeros(1, 2, 1000, 4), *(zeros(1, 1, 1000, 4),) * 2)),
    "a rotation": (ROTARY, (zeros(1, 2, 3, 4), *(zeros(1, 2, 1, 4),) * 2)),
    "routed rows": (routed, {}),
    "routed rows of some experts": (routed, {"active_expert_range": [1, 3]}),
    "grouped products": (grouped, {}),
    "grouped products by sums of rows": (grouped, {"group_list": torch.tensor([2, 2, 6]), "group_list_type": 0}),
    "grouped products with transposed weights": (grouped, {"weight": zeros(3, 16, 8).transpose(1, 2)}),
    "sums of rows of experts": (unpermuted, {}),
    "a scatter of int8": (SCATTER, (zeros(4, 2, dtype=torch.int8), INDEX.int(), zeros(2, 2, dtype=torch.int8))),
    "rounding by constants": (quantized, {}),
    "rounding by rows": (rounded, {}),
    "products of int8": (integers, {"bias": zeros(16, dtype=torch.int32)}),
    "products of int8 and scales of rows": (
        integers,
        {"pertoken_scale": zeros(3, dtype=FULL), "bias": zeros(16, dtype=FULL)},
    ),
    "products of int8 with transposed weights": (integers, {"x2": zeros(16, 8, dtype=torch.int8).t()}),
}


def ask(launch: Callable[..., Any], npu: torch.device, given: Any) -> Any:
    return launch(npu, **given) if isinstance(given, dict) else launch(npu, *given)


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_beyond_a_limit_is_refused(npu, name):
    launch, given, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=words) as refused:
        ask(launch, npu, given)
    assert "NPU function error: call aclnn failed, error code is " in str(refused.value)


@pytest.mark.parametrize("name", TAKEN)
def test_a_call_within_the_limits_is_accepted(npu, name):
    ask(TAKEN[name][0], npu, TAKEN[name][1])


def test_every_limit_refuses_a_call_and_has_a_source(npu):
    refusing = set()
    for launch, given, _ in REFUSED.values():
        with pytest.raises(Refused) as refused:
            ask(launch, npu, given)
        refusing.add(refused.value.limit)
    assert [limit.source for limit in LIMITS if limit not in refusing] == []
    assert all(limit.source for limit in LIMITS)
