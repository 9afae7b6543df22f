"""Limits of the fused attention operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ascend.operators.attention import COMPRESSED, lengths
from tests.ascend.operators.refusals import (
    DOCS,
    FLOAT,
    HALF,
    KERNEL,
    PARAMETER,
    TILING,
    Arguments,
    Limit,
    contiguous,
    dtypes,
    same_dtype,
)

_FIA = "cann/ops-transformer, attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md"
_FUSED = (
    "npu::npu_fused_infer_attention_score",
    "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_prompt_flash_attention",
    "npu::npu_incre_flash_attention",
)
_UNPAD = "atb::_npu_flash_attention_unpad"
_TRAINING = ("npu::npu_fusion_attention", "npu::npu_fusion_attention_v3")


@dataclass(frozen=True, slots=True)
class _Attention:
    """Arguments of a call to fused attention, interpreted according to the call's layout."""

    layout: str
    heads: int
    kv_heads: int
    query_dim: int
    key_dim: int
    value_dim: int
    queries: list[int]
    """Number of queries of each sequence. If the layout is not packed, one number applies to all sequences."""
    keys: list[int] | None
    """Number of keys of each sequence, or None if the call does not give these numbers."""
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
        if key.dim() == 5:  # NZ format: [blocks, heads, dim / 16, block_size, 16]
            key_dim, value_dim = (part.shape[2] * part.shape[4] for part in (key, value))
        rope = given.get("query_rope") is not None
        settings = given.get("block_size") or 0, given.get("atten_mask"), given.get("sparse_mode") or 0, rope
        return cls(layout, heads, kv_heads, width, key_dim, value_dim, queries, kv, table, *settings)

    @property
    def packed(self) -> bool:
        return self.layout in {"TND", "NTD"}

    @property
    def single(self) -> bool:
        """True if each sequence has one query in a layout with a batch axis. Such calls run incremental inference."""
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
    queries, keys, total = call.queries, call.keys, sum(call.queries)
    if not queries or keys is None:
        yield "When layout is TND, actualSeqLengths and actualSeqLengthsKv must be given."
        return
    rows = given["query"].shape[0 if call.layout == "TND" else 1]
    if total != rows:
        yield f"When layout is TND, queryT({rows}) must be equal to the last element of actualSequenceLengthQ({total})"
    if min(queries) < 0 or min(keys) < 0 or len(queries) != len(keys) or len(queries) > 4096:
        yield f"actualSeqLengths must grow, and be as many as those of the keys, 4096 at most: {queries}, {keys}"
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
    # The documentation requires fewer queries than keys, but vllm-ascend prefills whole prompts with equal numbers.
    if call.mode == 3 and any(count > length for count, length in zip(queries, keys, strict=False)):
        yield f"When layout is TND and sparseMode is 3, a sequence has more queries than keys: {queries}, {keys}"


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
    if call.table.dtype != torch.int32 or call.table.dim() != 2:
        yield f"blockTable must be int32 of two axes, it is {call.table.dtype} {tuple(call.table.shape)}."
    elif call.keys is None:
        yield "actualSeqLengthsKv must be given with a blockTable."
    else:
        yield from _cache(call, given["key"])
        yield from _table(call, call.table, max(call.keys, default=0), batch=given["query"].shape[0])


def _cache(call: _Attention, key: Tensor) -> Iterator[str]:
    size, shape = call.block_size, tuple(key.shape)
    step = 128 if not call.packed and not call.single and not call.rope else 16
    most = 128 if call.packed else 512
    if not size or size % step or size > most:
        yield f"blockSize({size}) must be a multiple of {step}, {most} at most."
    if shape[{3: 1, 4: 2, 5: 3}[key.dim()]] != size:
        yield f"blockSize({size}) is not that of the cache, {shape}."
    if key.dim() == 3 and shape[2] > 65535:
        yield f"KV_N * D is {shape[2]} with the cache as (blocks, block_size, H), it must not be more than 65535."
    if key.dim() != 3 and (call.layout in {"BSH", "BSND"} or (call.packed and not call.rope)):
        yield f"the cache {shape} must be (blocks, block_size, H) when the layout is {call.layout}."


def _single(given: Arguments) -> Iterator[str]:
    call, key = _Attention.of(given), given["key"]
    if not call.single:
        return
    longest = max(call.keys, default=0) if call.keys is not None else key.shape[{"BNSD": 2}.get(call.layout, 1)]
    if longest > 262144:
        yield f"KV_S({longest}) must not be more than 262144 when Q_S is 1."
    if call.table is not None and key.numel() > 2**31 - 1:
        yield f"key and value {tuple(key.shape)} must have as many elements as int32 counts when Q_S is 1."


def _table(call: _Attention, table: Tensor, longest: int, *, batch: int) -> Iterator[str]:
    rows, columns = table.shape
    if rows != (len(call.queries) if call.packed else batch):
        yield f"blockTable has {rows} rows for {len(call.queries) if call.packed else batch} sequences."
    if columns * call.block_size < longest:
        yield f"blockTable has {columns} columns, the longest sequence has {longest} tokens."
    whole = call.mask is not None and (call.single or call.mode in {0, 1})
    if whole and call.mask is not None and call.mask.shape[-1] < columns * call.block_size:
        yield f"attenMask's last axis is {call.mask.shape[-1]}, it must cover {columns} blocks of {call.block_size}."


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
    mask, mode = given.get("atten_mask"), given["sparse_mode"]
    if mask is not None and mode in {2, 3, 4} and tuple(mask.shape[-2:]) != (COMPRESSED, COMPRESSED):
        yield f"atten_mask {tuple(mask.shape)} must be (2048, 2048) when sparse_mode is {mode}."


def _training_mask(given: Arguments) -> Iterator[str]:
    query, mask = given["query"], given.get("atten_mask")
    if mask is None or given["input_layout"] != "BNSD" or given["sparse_mode"] not in {0, 1}:
        return
    (batch, heads, rows, _), columns = query.shape, given["key"].shape[2]
    axes = (rows, columns)
    if tuple(mask.shape) not in {(batch, heads, *axes), (batch, 1, *axes), (1, 1, *axes), axes}:
        yield (
            f"get unsupported atten_mask shape, the shape is {[*mask.shape]}. B=[{batch}], N=[{heads}], Sq=[{rows}], "
            f"Skv=[{columns}], supported atten_mask shape can be [B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] "
            "and [Sq, Skv]."
        )


def _training_lengths(given: Arguments) -> Iterator[str]:
    if given["input_layout"] != "TND":
        return
    stops, kv_stops = given.get("actual_seq_qlen"), given.get("actual_seq_kvlen")
    rows, kv_rows = given["query"].shape[0], given["key"].shape[0]
    if not stops or not kv_stops or len(stops) != len(kv_stops):
        yield "actual_seq_qlen and actual_seq_kvlen must be given, of the same length, when the layout is TND."
    elif len(stops) > 1024:  # the documentation says "1 to 2K" in one place, and "in varlen 1K at most" in another
        yield f"actual_seq_qlen has {len(stops)} sequences, 1024 at most."
    elif max(stops) > rows or max(kv_stops) > kv_rows:
        yield f"the sequences end at {max(stops)} and {max(kv_stops)}, beyond {rows} and {kv_rows}."


def _unpadded(given: Arguments) -> Iterator[str]:
    lengths_of, width = given["seq_len"], given["query"].shape[-1]
    if lengths_of.device.type != "cpu" or lengths_of.dtype != torch.int32:
        yield f"seq_len must be int32 on the host, it is {lengths_of.dtype} on {lengths_of.device}."
    elif int(lengths_of.sum()) != given["query"].shape[0]:
        yield f"seq_len sums to {int(lengths_of.sum())}, the query has {given['query'].shape[0]} rows."
    if 64 < width < 128 or width % 16:
        yield f"headDim({width}) must be a multiple of 16, and not between 64 and 128."


_UNPADDED = "vllm-ascend, ops/mm_encoder_attention.py before pull request 12084"
LIMITS = (
    Limit((_UNPAD,), _UNPADDED, PARAMETER, dtypes(HALF, "query", "key", "value", "out")),
    Limit((_UNPAD,), _UNPADDED, PARAMETER, contiguous("query", "key", "value", "out")),
    Limit((_UNPAD,), _UNPADDED, PARAMETER, _unpadded),
    Limit(_FUSED, f"{DOCS}, npu_fused_infer_attention_score: query", PARAMETER, dtypes(HALF, "query", "key", "value")),
    Limit(_FUSED, f"{DOCS}, the same: key, value", PARAMETER, same_dtype("query", "key", "value")),
    Limit(
        _FUSED, f"{DOCS}, the same: atten_mask", PARAMETER, dtypes((torch.bool, torch.int8, torch.uint8), "atten_mask")
    ),
    Limit(
        _FUSED,
        f"{DOCS}, the same: no tensors that are not contiguous",
        PARAMETER,
        contiguous("query", "key", "value", "atten_mask", "pse_shift", "block_table"),
    ),
    Limit(_FUSED, f"{DOCS}, npu_fused_infer_attention_score_v2: input_layout", TILING, _layout),
    Limit(_FUSED, f"{DOCS}, npu_fused_infer_attention_score: num_heads, num_key_value_heads", TILING, _heads),
    Limit(_FUSED, f"{DOCS}, the same: D in steps of 16, 512 at most, N*D below 65535 in BSH and BSND", TILING, _width),
    Limit(_FUSED, f"{DOCS}, the same: sparse_mode", TILING, _mask),
    Limit(_FUSED, f"{_FIA}: TND; CheckInputShapeWhenLayoutIsTND in vllm-ascend's pull request 9632", TILING, _packed),
    Limit(_FUSED, f"{_FIA}: page attention; {DOCS}, npu_fused_infer_attention_score: block_table", TILING, _pages),
    Limit(_FUSED, f"{DOCS}, npu_fused_infer_attention_score: Q_S is 1, its S and its page attention", TILING, _single),
    Limit(_TRAINING, f"{DOCS}, npu_fusion_attention: query", PARAMETER, dtypes(FLOAT, "query", "key", "value", "pse")),
    Limit(_TRAINING, f"{DOCS}, the same: one dtype", PARAMETER, same_dtype("query", "key", "value", "pse")),
    Limit(_TRAINING, f"{DOCS}, the same: atten_mask", PARAMETER, dtypes((torch.bool, torch.uint8), "atten_mask")),
    Limit(_TRAINING, f"{DOCS}, the same: shapes", TILING, _training_attention),
    Limit(_TRAINING, "aclnnFlashAttentionScore in vllm-project/vllm-ascend's issue 6573", KERNEL, _training_mask),
    Limit(_TRAINING, f"{DOCS}, the same: actual_seq_qlen, actual_seq_kvlen", TILING, _training_lengths),
)
