"""Limits of norms, rotary embeddings, activations and writes to a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ascend.operators.refusals import (
    DOCS,
    FLOAT,
    PARAMETER,
    Arguments,
    Limit,
    contiguous,
    dtypes,
    same_dtype,
)

_SCATTER = ("npu::npu_scatter_nd_update_", "npu::npu_scatter_nd_update")
_SCATTERED = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)
_CACHE = ("npu::npu_scatter_pa_kv_cache",)


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
        if mode == "interleave" and sum(axis != 1 for axis in part.shape[:3]) > 1:
            yield f"cos and sin {tuple(part.shape)} must be 11SD, 1S1D or S11D when rotary_mode is interleave."


def _rotary_counts(given: Arguments) -> Iterator[str]:
    values, cos = given["input"], given["r1"]
    if values.dim() != 4 or cos.dim() != 4:
        return
    # The layout is not an argument. It follows from the cosines, which differ along the axis of the tokens.
    tokens = [axis for axis in range(3) if cos.shape[axis] != 1] or [0, 1, 2]
    others = [[size for axis, size in enumerate(values.shape[:3]) if axis != one] for one in tokens]
    whole = given["rotary_mode"] == "interleave"
    if all((first * second if whole else max(first, second)) >= 1000 for first, second in others):
        yield f"x is {tuple(values.shape)}, {'B * N' if whole else 'B and N'} must be less than 1000."


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


LIMITS = (
    Limit(("npu::npu_rms_norm",), f"{DOCS}, npu_rms_norm", PARAMETER, dtypes(FLOAT, "input", "gamma")),
    Limit(("npu::npu_rms_norm",), f"{DOCS}, npu_rms_norm: gamma", PARAMETER, same_dtype("input", "gamma")),
    Limit(
        ("npu::npu_add_rms_norm",),
        f"{DOCS}, npu_rms_norm, which it adds a sum to",
        PARAMETER,
        dtypes(FLOAT, "x1", "x2", "gamma"),
    ),
    Limit(("npu::npu_add_rms_norm",), f"{DOCS}, npu_rms_norm: gamma", PARAMETER, same_dtype("x1", "x2", "gamma")),
    Limit(
        ("npu::npu_rms_norm", "npu::npu_add_rms_norm"),
        f"{DOCS}, npu_rms_norm: gamma; its 2 to 8 axes are 1 to 8 in CANN's aclnnRmsNorm",
        PARAMETER,
        _norm,
    ),
    Limit(("npu::npu_rotary_mul",), f"{DOCS}, npu_rotary_mul", PARAMETER, dtypes(FLOAT, "input", "r1", "r2")),
    Limit(("npu::npu_rotary_mul",), f"{DOCS}, npu_rotary_mul, jit_compile=False", PARAMETER, _rotary),
    Limit(("npu::npu_rotary_mul",), f"{DOCS}, the same: B, N < 1000; B * N < 1000", PARAMETER, _rotary_counts),
    Limit(
        ("npu::npu_apply_rotary_pos_emb",),
        f"{DOCS}, npu_apply_rotary_pos_emb",
        PARAMETER,
        dtypes(FLOAT, "query", "key", "cos", "sin"),
    ),
    Limit(("npu::npu_apply_rotary_pos_emb",), f"{DOCS}, the same", PARAMETER, _rotary_in_place),
    Limit(("npu::npu_swiglu",), f"{DOCS}, npu_swiglu", PARAMETER, dtypes(FLOAT, "input")),
    Limit(_SCATTER, f"{DOCS}, npu_scatter_nd_update_", PARAMETER, dtypes(_SCATTERED, "input", "updates")),
    Limit(
        _SCATTER, f"{DOCS}, npu_scatter_nd_update_: indices", PARAMETER, dtypes((torch.int32, torch.int64), "indices")
    ),
    Limit(_SCATTER, f"{DOCS}, npu_scatter_nd_update_: updates", PARAMETER, same_dtype("input", "updates")),
    Limit(_SCATTER, f"{DOCS}, npu_scatter_nd_update_: the shapes of its constraints", PARAMETER, _scatter),
    Limit(
        _CACHE,
        f"{DOCS}, npu_scatter_pa_kv_cache",
        PARAMETER,
        contiguous("key", "value", "key_cache", "value_cache", "slot_mapping"),
    ),
    Limit(_CACHE, f"{DOCS}, the same", PARAMETER, same_dtype("key", "value", "key_cache", "value_cache")),
    Limit(_CACHE, f"{DOCS}, the same: shapes", PARAMETER, _slots),
)
