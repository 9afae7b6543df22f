"""What an Ascend 910B (Atlas A2) refuses, each with where that is said. A call outside it raises as torch_npu does.

Where documents differ, the newest CANN's counts, which is what torch_npu 2.13 pairs with. Older ones take less
(issue 8045 of vllm-project/vllm-ascend: heads of 192 alone in TND; issue 4373: no pages in TND).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.ascend.operators.attention import COMPRESSED, lengths

Arguments = Mapping[str, Any]
"""By the schema's names, defaults included."""

_HALF = (torch.float16, torch.bfloat16)
_FLOAT = (torch.float32, *_HALF)
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
"""CANN's names: aclDataType in CANN's Runtime API reference."""

PARAMETER, TILING = 161002, 561002
"""Codes of aclnn: a parameter that its checks refuse; one that the kernel's tiling refuses."""

_DOCS = "torch_npu 2.13.0, _op_plugin_docs.py"
_FIA = "cann/ops-transformer, attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md"
_FUSED = (
    "npu::npu_fused_infer_attention_score",
    "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_prompt_flash_attention",
    "npu::npu_incre_flash_attention",
)


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that some operators refuse."""

    operators: tuple[str, ...]
    source: str
    code: int
    refusals: Callable[[Arguments], Iterable[str]]
    """What is wrong with a call, in CANN's words where they are known."""


def of(operator: str) -> Callable[[Arguments], None] | None:
    """A check of a call's arguments; None where nothing is known that the device refuses."""
    found = [limit for limit in LIMITS if operator in limit.operators]
    return (lambda arguments: _check(operator, found, arguments)) if found else None


def _check(operator: str, limits: list[Limit], arguments: Arguments) -> None:
    for limit in limits:
        for refusal in limit.refusals(arguments):
            # As in issues 8045 and 9632 of vllm-project/vllm-ascend, and OP_CHECK_DTYPE_NOT_SUPPORT of CANN's aclnn.
            kind = "AclNN_Parameter_Error(EZ1001)" if limit.code == PARAMETER else "E89999: Inner Error! E89999"
            raise RuntimeError(
                f"{operator.partition('::')[2]}: NPU function error: call aclnn failed, error code is {limit.code}\n"
                f"[ERROR] ERR00100 PTA call acl api failed.\n{kind}: {refusal}"
            )


def _dtypes(supported: Iterable[torch.dtype], *names: str) -> Callable[[Arguments], Iterator[str]]:
    """Each tensor among the arguments `names` has one of the dtypes."""
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


def _same_dtype(first: str, *others: str) -> Callable[[Arguments], Iterator[str]]:
    def refusals(arguments: Arguments) -> Iterator[str]:
        for name in others:
            tensor = arguments.get(name)
            if isinstance(tensor, Tensor) and tensor.dtype != arguments[first].dtype:
                yield f"Tensor {name} expected dtype is {arguments[first].dtype} but found {tensor.dtype}."

    return refusals


def _contiguous(*names: str) -> Callable[[Arguments], Iterator[str]]:
    def refusals(arguments: Arguments) -> Iterator[str]:
        for name in names:
            tensor = arguments.get(name)
            if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                yield f"Tensor {name} is not contiguous, strides {tensor.stride()}."

    return refusals


@dataclass(frozen=True, slots=True)
class _Attention:
    """A call of fused attention, read by its layout."""

    layout: str
    heads: int
    kv_heads: int
    query_dim: int
    key_dim: int
    value_dim: int
    queries: list[int]
    """Of each sequence; of one that stands for all in a layout that is not packed."""
    keys: list[int] | None
    """Likewise, where they are given."""
    table: Tensor | None
    block_size: int
    mask: Tensor | None
    mode: int
    rope: bool

    @classmethod
    def of(cls, given: Arguments) -> _Attention:
        query, key, value = given["query"], given["key"], given["value"]
        layout = given["input_layout"].partition("_")[0]
        heads = given.get("num_heads") or given["num_query_heads"]
        kv_heads = given.get("num_key_value_heads") or heads
        table = given.get("block_table")
        axis = {"BSH": 1, "BSND": 1, "BNSD": 2}.get(layout)
        stops = next((given[name] for name in ("actual_seq_qlen", "actual_seq_lengths") if given.get(name)), None)
        kv = next((given[name] for name in ("actual_seq_kvlen", "actual_seq_lengths_kv") if given.get(name)), None)
        packed = axis is None
        queries = lengths([int(stop) for stop in stops or ()]) if packed else [query.shape[axis]]
        if kv is not None:
            kv = lengths([int(n) for n in kv]) if packed and table is None else [int(n) for n in kv]
        width = query.shape[-1] // (heads if layout == "BSH" else 1)
        flat = key.dim() == 3 and (table is not None or layout == "BSH")
        key_dim, value_dim = (part.shape[-1] // (kv_heads if flat else 1) for part in (key, value))
        if key.dim() == 5:  # NZ: (blocks, heads, dim / 16, block_size, 16)
            key_dim, value_dim = (part.shape[2] * part.shape[4] for part in (key, value))
        rope = given.get("query_rope") is not None
        settings = given.get("block_size") or 0, given.get("atten_mask"), given.get("sparse_mode") or 0, rope
        return cls(layout, heads, kv_heads, width, key_dim, value_dim, queries, kv, table, *settings)

    @property
    def packed(self) -> bool:
        return self.layout in {"TND", "NTD"}

    @property
    def single(self) -> bool:
        """One query a sequence, in a layout with a batch axis: the branch for incremental inference."""
        return not self.packed and self.queries == [1]


def _layout(given: Arguments) -> Iterator[str]:
    allowed = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND", "NTD_TND", "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")
    if given["input_layout"] not in allowed:
        yield f"inputLayout {given['input_layout']} is not supported, it must be one of {', '.join(allowed)}."


def _heads(given: Arguments) -> Iterator[str]:
    call = _Attention.of(given)
    if call.heads % call.kv_heads or call.heads > 64 * call.kv_heads:
        yield f"numHeads({call.heads}) must be a multiple of numKeyValueHeads({call.kv_heads}), of 64 at most."
    if call.heads > 256:
        yield f"numHeads({call.heads}) must not be more than 256."
    axis = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}.get(call.layout)
    if axis is not None and given["query"].shape[axis] != call.heads:
        yield f"numHeads({call.heads}) is not that of the query, {tuple(given['query'].shape)} as {call.layout}."
    if axis is not None and call.table is None and given["key"].shape[axis] != call.kv_heads:
        yield f"numKeyValueHeads({call.kv_heads}) is not that of the key, {tuple(given['key'].shape)} as {call.layout}."


def _width(given: Arguments) -> Iterator[str]:
    call = _Attention.of(given)
    widths = call.query_dim, call.key_dim, call.value_dim
    if max(widths) > 512 or any(width % 16 for width in widths):
        yield f"headDim {widths} must be aligned to 16 and not more than 512."
    if call.layout in {"BSH", "BSND"} and not call.single and call.heads * call.query_dim >= 65535:
        yield f"N*D of the query is {call.heads * call.query_dim}, it must be less than 65535 in {call.layout}."


def _packed(given: Arguments) -> Iterator[str]:
    call = _Attention.of(given)
    if not call.packed or call.query_dim == 512:
        return
    if not call.queries or call.keys is None:
        yield "When layout is TND, actualSeqLengths and actualSeqLengthsKv must be given."
        return
    rows = given["query"].shape[0 if call.layout == "TND" else 1]
    if sum(call.queries) != rows:
        yield f"When layout is TND, queryT({rows}) must be equal to the last element of actualSequenceLengthQ({sum(call.queries)})"
    if min(call.queries) < 0 or min(call.keys) < 0 or len(call.queries) != len(call.keys) or len(call.queries) > 4096:
        yield f"actualSeqLengths must grow, of as many sequences as those of the keys, 4096 at most: {call.queries}, {call.keys}"
    widths = call.query_dim, call.key_dim, call.value_dim
    alike = (64, 64, 64), (128, 128, 128), (192, 192, 192), (192, 192, 128)
    shared = call.heads != call.kv_heads and not given.get("inner_precise") and len({*widths}) == 1 and widths[0] <= 256
    if not call.rope and widths not in alike and not shared:
        yield (
            f"When layout is TND, queryD({widths[0]}), keyD({widths[1]}) and valueD({widths[2]}) must be same equal "
            "192/128/64, or queryD and keyD equal 192 and valueD equal 128."
        )
    if (call.mode, call.mask is not None) not in {(0, False), (3, True), (4, True)}:
        yield f"When layout is TND, sparseMode({call.mode}) must be 0 without a mask, or 3 or 4 with one."
    if call.mode == 3 and any(q > k for q, k in zip(call.queries, call.keys, strict=False)):
        yield f"When layout is TND and sparseMode is 3, no sequence may have more queries than keys: {call.queries}, {call.keys}"


def _mask(given: Arguments) -> Iterator[str]:
    call = _Attention.of(given)
    if call.mode not in {0, 1, 2, 3, 4, 9} and not call.single:
        yield f"sparseMode({call.mode}) is not supported."
    if call.single or call.mode not in {1, 2, 3, 4}:
        return
    if call.mask is None:
        yield f"attenMask must be given when sparseMode is {call.mode}."
    elif call.mode > 1 and tuple(call.mask.shape) not in {
        (COMPRESSED, COMPRESSED),
        (1, COMPRESSED, COMPRESSED),
        (1, 1, COMPRESSED, COMPRESSED),
    }:
        yield f"attenMask {tuple(call.mask.shape)} must be (2048, 2048) when sparseMode is {call.mode}."


def _pages(given: Arguments) -> Iterator[str]:
    call = _Attention.of(given)
    if call.table is None:
        return
    key = given["key"]
    if call.table.dtype != torch.int32 or call.table.dim() != 2:
        yield f"blockTable must be int32 of two axes, it is {call.table.dtype} {tuple(call.table.shape)}."
        return
    if call.keys is None:
        yield "actualSeqLengthsKv must be given with a blockTable."
        return
    size, step, most = call.block_size, 16, 512
    if call.packed:
        most = 128
    elif not call.single and not call.rope:
        step = 128
    if not size or size % step or size > most:
        yield f"blockSize({size}) must be a multiple of {step}, {most} at most."
        return
    if key.dim() == 3:
        if key.shape[2] > 65535:
            yield f"KV_N * D is {key.shape[2]} with the cache as (blocks, block_size, H), it must not be more than 65535."
    elif call.layout in {"BSH", "BSND"} or (call.packed and not call.rope):
        yield f"the cache {tuple(key.shape)} must be (blocks, block_size, H) when the layout is {call.layout}."
    if key.shape[{3: 1, 4: 2, 5: 3}[key.dim()]] != size:
        yield f"blockSize({size}) is not that of the cache, {tuple(key.shape)}."
    batch = len(call.queries) if call.packed else given["query"].shape[0]
    if len(call.table) != batch:
        yield f"blockTable has {len(call.table)} rows for {batch} sequences."
    needed = -(-max(call.keys, default=0) // size)
    if call.table.shape[1] < needed:
        yield f"blockTable has {call.table.shape[1]} columns, the longest sequence has {needed} blocks."
    full = call.mask is not None and (call.single or call.mode in {0, 1})
    if full and call.mask is not None and call.mask.shape[-1] < call.table.shape[1] * size:
        yield f"attenMask's last axis is {call.mask.shape[-1]}, it must cover {call.table.shape[1]} blocks of {size}."


def _training_attention(given: Arguments) -> Iterator[str]:
    query, layout, heads = given["query"], given["input_layout"], given["head_num"]
    if layout not in {"BSH", "SBH", "BSND", "BNSD", "TND"}:
        yield f"inputLayout {layout} is not supported, it must be BSH, SBH, BSND, BNSD or TND."
        return
    axis = {"BSND": 2, "BNSD": 1, "TND": 1}.get(layout)
    if axis is not None and query.shape[axis] != heads:
        yield f"head_num({heads}) is not that of the query, {tuple(query.shape)} as {layout}."
    if not 1 <= heads <= 256:
        yield f"head_num({heads}) must be from 1 to 256."
    width = query.shape[-1] // (1 if axis is not None else heads)
    if not 1 <= width <= 768:
        yield f"headDim({width}) must be from 1 to 768."
    if axis is not None and (given["key"].shape[-1] != width or given["value"].shape[-1] > width):
        yield f"headDims {width}, {given['key'].shape[-1]}, {given['value'].shape[-1]}: Dq must be Dk, and Dv not more."
    if layout == "TND":
        stops, kv_stops = given.get("actual_seq_qlen"), given.get("actual_seq_kvlen")
        if not stops or not kv_stops or len(stops) != len(kv_stops):
            yield "actual_seq_qlen and actual_seq_kvlen must be given, of the same length, when the layout is TND."
        elif len(stops) > 2048:
            yield f"actual_seq_qlen has {len(stops)} sequences, 2048 at most."
        elif max(stops) > query.shape[0] or max(kv_stops) > given["key"].shape[0]:
            yield f"the sequences end at {max(stops)} and {max(kv_stops)}, beyond {query.shape[0]} and {given['key'].shape[0]}."
    mask, mode = given.get("atten_mask"), given["sparse_mode"]
    if mask is not None and mode in {2, 3, 4} and tuple(mask.shape[-2:]) != (COMPRESSED, COMPRESSED):
        yield f"atten_mask {tuple(mask.shape)} must be (2048, 2048) when sparse_mode is {mode}."


def _rotary(given: Arguments) -> Iterator[str]:
    values, mode = given["input"], given["rotary_mode"]
    parts = given["r1"], given["r2"]
    if values.dim() != 4 or any(part.dim() != 4 for part in parts):
        yield "x, cos and sin must have four axes."
        return
    width = values.shape[-1]
    if width % 2 or width >= 896:
        yield f"D({width}) must be even and less than 896."
    if mode not in {"half", "interleave"}:
        yield f"rotary_mode {mode} is not supported."
    for part in parts:
        if any(own not in {1, other} for own, other in zip(part.shape[:3], values.shape[:3], strict=True)):
            yield f"cos and sin {tuple(part.shape)} must be as x {tuple(values.shape)}, or 1."
        if part.shape[-1] != width:
            yield f"cos and sin are {part.shape[-1]} wide, x is {width}."
        if mode == "interleave" and sum(own == other != 1 for own, other in zip(part.shape[:3], values.shape[:3])) > 1:
            yield f"cos and sin {tuple(part.shape)} must be 11SD, 1S1D or S11D when rotary_mode is interleave."


def _rotary_in_place(given: Arguments) -> Iterator[str]:
    if (width := given["query"].shape[-1]) not in {64, 128}:
        yield f"D({width}) must be 128 or 64."
    if not all(given[name].numel() for name in ("query", "key", "cos", "sin")):
        yield "empty tensors are not supported."


def _norm(given: Arguments) -> Iterator[str]:
    values, gamma = given.get("input", given.get("x1")), given["gamma"]
    if not 1 <= values.dim() <= 8 or tuple(values.shape[-gamma.dim() :]) != tuple(gamma.shape):
        yield f"gamma {tuple(gamma.shape)} must be the last axes of x {tuple(values.shape)}."


def _scatter(given: Arguments) -> Iterator[str]:
    values, indices, updates = given["input"], given["indices"], given["updates"]
    if indices.dim() < 2 or indices.shape[-1] > values.dim():
        yield f"indices {tuple(indices.shape)} must have two axes or more, the last of {values.dim()} at most."
        return
    expected = (*indices.shape[:-1], *values.shape[indices.shape[-1] :])
    if tuple(updates.shape) != expected:
        yield f"updates {tuple(updates.shape)} must be {expected}."


def _slots(given: Arguments) -> Iterator[str]:
    key, cache, slots = given["key"], given["key_cache"], given["slot_mapping"]
    if key.dim() == 3 and (slots.dim() != 1 or len(slots) != len(key)):
        yield f"slot_mapping {tuple(slots.shape)} must have a slot for each of {len(key)} rows."
    if cache.dim() != 4:
        yield f"key_cache {tuple(cache.shape)} must have four axes."


LIMITS: tuple[Limit, ...] = (
    Limit(
        ("aten::mm", "aten::matmul"),
        "CANN 8.5 API, aclnnMm and aclnnMatmul: BFLOAT16, FLOAT16, FLOAT32 on Atlas A2",
        PARAMETER,
        _dtypes(_FLOAT, "self", "mat2", "tensor2", "other"),
    ),
    Limit(
        ("aten::bmm",),
        "cann/ops-nn, matmul/batch_mat_mul_v3/docs/aclnnBatchMatMul.md: BFLOAT16, FLOAT16, FLOAT32",
        PARAMETER,
        _dtypes(_FLOAT, "self", "mat2"),
    ),
    Limit(
        ("aten::addmm", "aten::baddbmm"),
        "the products of aclnnMm and aclnnBatchMatMul, as above; a page of their own was not found",
        PARAMETER,
        _dtypes(_FLOAT, "mat1", "mat2", "batch1", "batch2"),
    ),
    Limit(
        ("aten::softmax", "aten::_softmax"),
        "CANN 8.5 API, aclnnSoftmax: FLOAT16, FLOAT32, DOUBLE, BFLOAT16, of 8 axes at most",
        PARAMETER,
        _dtypes((*_FLOAT, torch.float64), "self"),
    ),
    Limit(_FUSED, f"{_DOCS}, npu_fused_infer_attention_score: query", PARAMETER, _dtypes(_HALF, "query", "key", "value")),
    Limit(_FUSED, f"{_DOCS}, the same: key, value", PARAMETER, _same_dtype("query", "key", "value")),
    Limit(
        _FUSED,
        f"{_DOCS}, the same: atten_mask",
        PARAMETER,
        _dtypes((torch.bool, torch.int8, torch.uint8), "atten_mask"),
    ),
    Limit(
        _FUSED,
        f"{_DOCS}, the same: no tensors that are not contiguous",
        PARAMETER,
        _contiguous("query", "key", "value", "atten_mask", "pse_shift", "block_table"),
    ),
    Limit(_FUSED, f"{_DOCS}, npu_fused_infer_attention_score_v2: input_layout", TILING, _layout),
    Limit(_FUSED, f"{_DOCS}, npu_fused_infer_attention_score: num_heads, num_key_value_heads", TILING, _heads),
    Limit(_FUSED, f"{_DOCS}, the same: D is aligned to 16, 512 at most, N*D below 65535 in BSH and BSND", TILING, _width),
    Limit(_FUSED, f"{_DOCS}, the same: sparse_mode", TILING, _mask),
    Limit(_FUSED, f"{_FIA}: TND; CheckInputShapeWhenLayoutIsTND in vllm-ascend's pull request 9632", TILING, _packed),
    Limit(_FUSED, f"{_FIA}: page attention; {_DOCS}, npu_fused_infer_attention_score: block_table", TILING, _pages),
    Limit(
        ("npu::npu_fusion_attention",),
        f"{_DOCS}, npu_fusion_attention",
        PARAMETER,
        _dtypes(_FLOAT, "query", "key", "value", "pse"),
    ),
    Limit(("npu::npu_fusion_attention",), f"{_DOCS}, the same", PARAMETER, _same_dtype("query", "key", "value", "pse")),
    Limit(
        ("npu::npu_fusion_attention",),
        f"{_DOCS}, the same: atten_mask",
        PARAMETER,
        _dtypes((torch.bool, torch.uint8), "atten_mask"),
    ),
    Limit(("npu::npu_fusion_attention",), f"{_DOCS}, the same: shapes", TILING, _training_attention),
    Limit(("npu::npu_rms_norm",), f"{_DOCS}, npu_rms_norm", PARAMETER, _dtypes(_FLOAT, "input", "gamma")),
    Limit(("npu::npu_rms_norm",), f"{_DOCS}, npu_rms_norm: gamma", PARAMETER, _same_dtype("input", "gamma")),
    Limit(
        ("npu::npu_add_rms_norm",),
        f"{_DOCS}, npu_rms_norm, which it adds a sum to",
        PARAMETER,
        _dtypes(_FLOAT, "x1", "x2", "gamma"),
    ),
    Limit(("npu::npu_add_rms_norm",), f"{_DOCS}, npu_rms_norm: gamma", PARAMETER, _same_dtype("x1", "x2", "gamma")),
    Limit(("npu::npu_rms_norm", "npu::npu_add_rms_norm"), f"{_DOCS}, npu_rms_norm: gamma", PARAMETER, _norm),
    Limit(("npu::npu_rotary_mul",), f"{_DOCS}, npu_rotary_mul", PARAMETER, _dtypes(_FLOAT, "input", "r1", "r2")),
    Limit(("npu::npu_rotary_mul",), f"{_DOCS}, npu_rotary_mul, jit_compile=False", PARAMETER, _rotary),
    Limit(
        ("npu::npu_apply_rotary_pos_emb",),
        f"{_DOCS}, npu_apply_rotary_pos_emb",
        PARAMETER,
        _dtypes(_FLOAT, "query", "key", "cos", "sin"),
    ),
    Limit(("npu::npu_apply_rotary_pos_emb",), f"{_DOCS}, the same", PARAMETER, _rotary_in_place),
    Limit(("npu::npu_swiglu",), f"{_DOCS}, npu_swiglu", PARAMETER, _dtypes(_FLOAT, "input")),
    Limit(
        ("npu::npu_scatter_nd_update_", "npu::npu_scatter_nd_update"),
        f"{_DOCS}, npu_scatter_nd_update_",
        PARAMETER,
        _dtypes((torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8), "input", "updates"),
    ),
    Limit(
        ("npu::npu_scatter_nd_update_", "npu::npu_scatter_nd_update"),
        f"{_DOCS}, npu_scatter_nd_update_: indices",
        PARAMETER,
        _dtypes((torch.int32, torch.int64), "indices"),
    ),
    Limit(
        ("npu::npu_scatter_nd_update_", "npu::npu_scatter_nd_update"),
        f"{_DOCS}, npu_scatter_nd_update_: updates",
        PARAMETER,
        _same_dtype("input", "updates"),
    ),
    Limit(
        ("npu::npu_scatter_nd_update_", "npu::npu_scatter_nd_update"),
        f"{_DOCS}, npu_scatter_nd_update_: the shapes of its constraints",
        PARAMETER,
        _scatter,
    ),
    Limit(
        ("npu::npu_scatter_pa_kv_cache",),
        f"{_DOCS}, npu_scatter_pa_kv_cache",
        PARAMETER,
        _contiguous("key", "value", "key_cache", "value_cache", "slot_mapping"),
    ),
    Limit(
        ("npu::npu_scatter_pa_kv_cache",),
        f"{_DOCS}, npu_scatter_pa_kv_cache",
        PARAMETER,
        _same_dtype("key", "value", "key_cache", "value_cache"),
    ),
    Limit(("npu::npu_scatter_pa_kv_cache",), f"{_DOCS}, npu_scatter_pa_kv_cache", PARAMETER, _slots),
)
