"""Bytes that a launch moves and floating-point operations that it computes, for the virtual clock of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tests.ascend.operators.attention import lengths

_PRODUCTS = {"mm", "matmul", "bmm", "addmm", "baddbmm", "linear"}
_READS_ROWS = {"embedding", "index_select", "gather", "index"}
_WRITES_ROWS = {
    *("index_copy_", "index_put_", "_index_put_impl_", "scatter_", "npu_scatter_nd_update_"),
    *("npu_scatter_pa_kv_cache", "_npu_reshape_and_cache"),
}


def cost(operator: str, named: Mapping[str, Any], result: Any) -> tuple[int, int]:
    """Return the bytes and the floating-point operations of a call, from its arguments by name and its result.

    An operator reads and writes each tensor once. If it reads or writes some rows of a table or of pages, only these
    rows count.
    """
    name = operator.partition("::")[2].partition(".")[0]
    given = [*_tensors(named.values())]
    outs = [*_tensors([result])]
    moved = sum(map(_bytes, (*given, *outs)))
    if name in _PRODUCTS:
        inner = next(one.shape[-1] for one in given[-2:])
        return moved, 2 * inner * sum(out.numel() for out in outs)
    if name in _READS_ROWS:
        return 2 * sum(map(_bytes, outs)), 0
    if name in _WRITES_ROWS:
        return 2 * sum(map(_bytes, _updates(named))), 0
    if "key" in named and "query" in named and "value" in named:
        return _attention(named, outs)
    return moved, sum(out.numel() for out in outs)


def _attention(named: Mapping[str, Any], outs: Sequence[Tensor]) -> tuple[int, int]:
    """Count the keys and values of each sequence once. `named` may lack lengths, as in SDPA."""
    query, key, value = named["query"], named["key"], named["value"]
    # torch leaves out arguments that equal their defaults.
    heads = named.get("num_heads") or named.get("num_query_heads") or named.get("head_num") or 1
    stops = [int(n) for n in named.get("actual_seq_lengths") or named.get("actual_seq_qlen") or ()]
    kv = [int(n) for n in named.get("actual_seq_lengths_kv") or named.get("actual_seq_kvlen") or ()]
    moved = _bytes(query) + sum(map(_bytes, outs))
    if named.get("block_table") is None:
        moved += _bytes(key) + _bytes(value)
        keys = key.shape[-2] if not kv else max(lengths(kv), default=0)
        return moved, 4 * query.numel() * keys
    size = named["block_size"]
    token = sum(part[0].numel() * part.element_size() // size for part in (key, value))
    rows = lengths(stops) if named["input_layout"] == "TND" else [query[0].numel() // query.shape[-1]] * len(query)
    width = query.shape[-1] * (heads if named["input_layout"] == "TND" else 1)
    return moved + token * sum(kv), 4 * width * sum(row * length for row, length in zip(rows, kv, strict=False))


def _updates(named: Mapping[str, Any]) -> Iterator[Tensor]:
    for name in ("updates", "source", "src", "values", "value", "key"):
        if isinstance(named.get(name), Tensor):
            yield named[name]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
