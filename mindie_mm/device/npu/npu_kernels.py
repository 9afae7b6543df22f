"""Fused operators of torch_npu: attention over pages, cache writes, parts of layers and mixtures of experts.

docs/npu.md lists the supported shapes, dtypes and layouts with their sources. When a shape is first used, a trial
(`trials.py`) shows whether this torch_npu, CANN and chip compute the operator correctly. If they do not, a warning is
logged once, and plain PyTorch is used instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mindie_mm.device.alive import require_alive
from mindie_mm.device.finding import Finding
from mindie_mm.device.joined_experts import ExpertWeights
from mindie_mm.device.kernels import Kernels, Rows
from mindie_mm.device.npu import npu_experts, npu_products, npu_rows, packed_attention, trials
from mindie_mm.device.transfer import upload

_log = logging.getLogger(__name__)

_ADVICE = "plain torch is used instead, which is slower; another CANN may have a correct operator"

HALF = (torch.float16, torch.bfloat16)
_ATTENTION = "npu_fused_infer_attention_score"
_PACKED_ATTENTION = "npu_fused_infer_attention_score (TND)"
_REST = "npu_fused_infer_attention_score (TND, NaN after the end)"
_SCATTER_BOTH = "npu_scatter_pa_kv_cache"
_SCATTER = "npu_scatter_nd_update_"
_ADD_NORM = "npu_add_rms_norm"
_SPLIT = "split_with_sizes_copy"
_SWIGLU = "npu_swiglu"
_ROTATE_ROWS = "npu_rotary_mul (BSND)"
SDPA = "scaled_dot_product_attention"
_PACKED_WIDTH = 128
"""Width of a head in packed attention (layout TND)."""
_MAX_PACKED = 4096
"""Maximum number of sequences in packed attention."""
_MAX_WIDTH = 512
_MAX_KEYS = 262144
_MAX_ELEMENTS = 2**31 - 1
"""Maximum number of elements of the KV cache in layout BSH.

`_MAX_KEYS` is the maximum length of a sequence in tokens.
"""
_MAX_SHARE = 64
"""Maximum number of heads that share a key-value head."""
_MASK_SIZE = 2048
"""Side of the triangular mask that represents every causal mask (sparse_mode 3)."""
_BLOCK_STEP, _MAX_BLOCK = 128, 512
"""The number of tokens in a KV block must be a multiple of `_BLOCK_STEP`, and at most `_MAX_BLOCK`.

For layout TND, only `_BLOCK_STEP` is certain to be supported.
"""


class NPUKernels(Kernels):
    """The fused operators that torch_npu and CANN provide for an Ascend NPU."""

    has_attention: ClassVar[bool] = True
    counts_launches: ClassVar[bool] = True
    attends_in_graphs: ClassVar[bool] = True
    rounds_experts: ClassVar[bool] = True

    def attends(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> bool:
        (heads, _, width), (_, block_size, kv_heads, _) = query.shape, keys.shape
        return (
            query.dtype in HALF
            and keys.shape == values.shape
            and width <= _MAX_WIDTH
            and width % 16 == 0
            and heads <= _MAX_SHARE * kv_heads
            and block_size % _BLOCK_STEP == 0
            and block_size <= _MAX_BLOCK
            and (
                _packs(query, keys, len(rows.lengths))
                or (
                    max(rows.lengths) <= _MAX_KEYS
                    and keys.numel() <= _MAX_ELEMENTS
                    and works(_ATTENTION, query.device, query.dtype, heads, kv_heads, width, block_size)
                )
            )
        )

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
        attend = _attend_packed if _packs(query, keys, len(rows.stops)) else _attend_apart
        return attend(query, keys, values, rows, scaling)

    has_layers: ClassVar[bool] = True

    def ignores_rest(self, keys: Tensor, heads: int) -> bool:
        _, block_size, kv_heads, width = keys.shape
        query = keys.new_empty(heads, 0, width)
        return (
            keys.dtype in HALF
            and heads <= _MAX_SHARE * kv_heads
            and _packs(query, keys, 1)
            and works(_REST, keys.device, keys.dtype, heads, kv_heads, width, block_size)
        )

    def store(self, pages: tuple[Tensor, Tensor], slots: Tensor, key: Tensor, value: Tensor) -> None:
        kind = key.device, key.dtype, *key.shape[1:], value.shape[-1]
        for operator in (_SCATTER_BOTH, _SCATTER):
            if works(operator, *kind):
                _TRIALS[operator][1](pages, slots, key, value)
                return
        super().store(pages, slots, key, value)

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        normalize = rms_norm if works("npu_rms_norm", weight.device, weight.dtype, *weight.shape) else super().rms_norm
        return normalize(hidden, weight, eps)

    def add_rms_norm(self, hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if works(_ADD_NORM, weight.device, weight.dtype, *weight.shape):
            return npu_rows.add_rms_norm(hidden, added, weight, eps)
        return super().add_rms_norm(hidden, added, weight, eps)

    def split(self, joined: Tensor, widths: Sequence[int]) -> list[Tensor]:
        if len(joined) > 1 and works(_SPLIT, joined.device, joined.dtype, *widths):
            return npu_rows.split(joined, widths)
        return super().split(joined, widths)  # the parts of a single row are contiguous

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        kind = query.device, query.dtype, query.shape[1], *key.shape[1:]
        for operator in (npu_rows.ROTATE_BOTH, _ROTATE_ROWS):
            if npu_rows.rotates(operator, query, key) and works(operator, *kind):
                rotated: tuple[Tensor, Tensor] = _TRIALS[operator][1](query, key, cos, sin)
                return rotated
        return super().rotate(query, key, cos, sin)

    def swiglu(self, joined: Tensor) -> Tensor:
        fused = works(_SWIGLU, joined.device, joined.dtype, joined.shape[-1])
        return npu_rows.swiglu(joined) if fused else super().swiglu(joined)

    def experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        kind = hidden.device, hidden.dtype, *experts.first.shape[1:], experts.second.shape[2]
        name = npu_experts.NAME if experts.scales is None else npu_experts.ROUNDED
        fused = hidden.dtype in HALF and npu_experts.supports(experts) and works(name, *kind)
        return (npu_experts.run if fused else super().experts)(hidden, chosen, weights, experts)


def _packs(query: Tensor, keys: Tensor, num_sequences: int) -> bool:
    """Return whether one call can compute all rows.

    Older releases of CANN support the layout TND only for another head size or without pages.
    """
    heads, kv_heads = query.shape[0], keys.shape[2]
    return (
        query.shape[-1] == _PACKED_WIDTH
        and num_sequences <= _MAX_PACKED
        and keys.shape[1] == _BLOCK_STEP
        and works(_PACKED_ATTENTION, query.device, query.dtype, heads, kv_heads, _PACKED_WIDTH, _BLOCK_STEP)
    )


def _attend_packed(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
    return _fused(
        query.transpose(0, 1).contiguous(),
        *_pages(keys, values),
        input_layout="TND",
        actual_seq_lengths=rows.stops,
        actual_seq_lengths_kv=rows.lengths,
        block_table=rows.blocks,
        atten_mask=_triangle(query.device),
        sparse_mode=3,
        **_settings(query, keys, scaling),
    )


def _attend_apart(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
    """Compute all single rows in one call, and each longer chunk in a separate call."""
    flat, pages, settings = query.transpose(0, 1).contiguous(), _pages(keys, values), _settings(query, keys, scaling)
    out = torch.empty_like(flat)
    if rows.singles:
        _attend_singles(flat, pages, rows, settings, out)
    first = 0
    for number, (stop, length) in enumerate(zip(rows.stops, rows.lengths, strict=True)):
        if stop - first > 1:
            out[first:stop] = _fused(
                flat[first:stop].flatten(1).unsqueeze(0),
                *pages,
                input_layout="BSH",
                actual_seq_lengths=[stop - first],
                actual_seq_lengths_kv=[length],
                block_table=rows.blocks[number : number + 1],
                atten_mask=_triangle(query.device),
                sparse_mode=3,
                **settings,
            ).view(stop - first, *flat.shape[1:])
        first = stop
    return out


def _pages(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys.flatten(2), values.flatten(2)  # (blocks, block_size, kv_heads * head_dim)


def _settings(query: Tensor, keys: Tensor, scaling: float) -> dict[str, Any]:
    return {
        "num_heads": query.shape[0],
        "num_key_value_heads": keys.shape[2],
        "scale": scaling,
        "block_size": keys.shape[1],
    }


def _attend_singles(
    flat: Tensor, pages: tuple[Tensor, Tensor], rows: Rows, settings: dict[str, Any], out: Tensor
) -> None:
    """Compute the rows of all sequences with one row in one call, and write them to `out`."""
    alone = len(rows.singles) == len(rows.stops)
    query = flat if alone else flat.index_select(0, rows.single_rows)
    blocks = rows.blocks if alone else rows.blocks.index_select(0, rows.single_sequences)
    attended = _fused(
        query.flatten(1).unsqueeze(1),
        *pages,
        input_layout="BSH",
        actual_seq_lengths=[1] * len(rows.singles),
        actual_seq_lengths_kv=[rows.lengths[number] for number in rows.singles],
        block_table=blocks,
        **settings,
    ).view(query.shape)
    if alone:
        out.copy_(attended)
    else:
        out.index_copy_(0, rows.single_rows, attended)


def _fused(query: Tensor, keys: Tensor, values: Tensor, **settings: Any) -> Tensor:
    out: Tensor = torch.ops.npu.npu_fused_infer_attention_score(query, keys, values, **settings)[0]
    return out


@cache
def _triangle(device: torch.device) -> Tensor:
    """Return the causal mask, bool [2048, 2048]. It is True above the diagonal, for masked positions."""
    return upload(torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu(1), device)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMS normalization with `weight` [width] to `hidden` [..., width]. The statistics are in float32."""
    out: Tensor = torch.ops.npu.npu_rms_norm(hidden, weight, eps)[0]
    return out


def rotary(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to values [B, N, S, D], with cos and sin [B or 1, 1, S, D].

    The first half of each head pairs with the second half.
    """
    out: Tensor = torch.ops.npu.npu_rotary_mul(values, cos, sin)
    return out


_TRIALS: dict[str, tuple[Callable[..., trials.Results], Callable[..., Any]]] = {
    _ATTENTION: (trials.attention, _attend_apart),
    _PACKED_ATTENTION: (trials.attention, _attend_packed),
    _REST: (partial(trials.attention, has_rest=False), _attend_packed),
    _SCATTER_BOTH: (trials.store, npu_rows.scatter_both),
    _SCATTER: (trials.store, npu_rows.scatter),
    **{name: (trials.packed_attention, function) for name, function in packed_attention.OPERATORS.items()},
    SDPA: (trials.sdpa, scaled_dot_product_attention),
    "npu_rms_norm": (trials.rms_norm, rms_norm),
    _ADD_NORM: (trials.add_rms_norm, npu_rows.add_rms_norm),
    "npu_rotary_mul": (trials.rotary, rotary),
    npu_rows.ROTATE_BOTH: (trials.rotary_rows, npu_rows.rotate_both),
    _ROTATE_ROWS: (trials.rotary_rows, npu_rows.rotate_rows),
    _SPLIT: (trials.split, npu_rows.split),
    _SWIGLU: (trials.swiglu, npu_rows.swiglu),
    npu_experts.NAME: (partial(trials.experts, rounds=False), npu_experts.run),
    npu_experts.ROUNDED: (partial(trials.experts, rounds=True), npu_experts.run),
    npu_products.DYNAMIC: (partial(trials.quantized, is_static=False), npu_products.multiply_dynamic),
    npu_products.STATIC: (partial(trials.quantized, is_static=True), npu_products.multiply_static),
}
_SIZES: dict[str, tuple[int, ...]] = {
    _ATTENTION: (28, 4, 128, 128),
    _PACKED_ATTENTION: (28, 4, 128, 128),
    _REST: (28, 4, 128, 128),
    _SCATTER_BOTH: (4, 128, 128),
    _SCATTER: (4, 128, 128),
    **dict.fromkeys(packed_attention.OPERATORS, (16, 80)),
    SDPA: (128,),
    "npu_rms_norm": (3584,),
    _ADD_NORM: (3584,),
    "npu_rotary_mul": (128,),
    npu_rows.ROTATE_BOTH: (28, 4, 128),
    _ROTATE_ROWS: (28, 4, 128),
    _SPLIT: (3584, 512, 512),
    _SWIGLU: (37888,),
    **dict.fromkeys((npu_experts.NAME, npu_experts.ROUNDED), (1536, 2048, 768)),
    npu_products.DYNAMIC: (3584, 3584),
    npu_products.STATIC: (3584, 3584),
}
"""Sizes for the trial of each operator, as in Qwen2.5-VL-7B, and as in Qwen3-VL-30B-A3B for experts."""


_NEXT = {
    _PACKED_ATTENTION: "its layout BSH",
    _REST: "zeroing of KV blocks",
    _SCATTER_BOTH: _SCATTER,
    npu_rows.ROTATE_BOTH: _ROTATE_ROWS,
    **dict(pairwise(packed_attention.OPERATORS)),
}
"""Operators that replace others, which are tried next. Plain torch replaces all other operators."""


@cache
def works(operator: str, device: torch.device, dtype: torch.dtype, *shape: int) -> bool:
    """Return whether an operator gives correct results on `device`. The first call runs a trial. Its result is cached.

    Args:
        operator: Name of the operator.
        device: The NPU.
        dtype: The dtype of the tensors.
        shape: Sizes for the operator's trial in `_TRIALS`.

    Raises:
        DeviceError: The device no longer computes after the trial.

    """
    try:
        difference = _difference(operator, device, dtype, *shape)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        require_alive(device)
        _tell(operator, dtype, f"does not run on {device}", str(error).partition("\n")[0])
        return False
    if not difference <= trials.LIMITS[dtype]:  # the difference may be NaN
        reason = (
            f"its results differ from those of plain torch by {difference:.3g}; the limit is {trials.LIMITS[dtype]:g}"
        )
        _tell(operator, dtype, f"gives wrong results on {device}", reason)
        return False
    return True


def _difference(
    operator: str, device: torch.device, dtype: torch.dtype, *shape: int, times: list[float] | None = None
) -> float:
    """Return the largest difference between the operator and plain torch. Append the time of each call to `times`."""
    trial, function = _TRIALS[operator]

    def timed(*arguments: Any, **settings: Any) -> Any:
        copies = [one.clone() if isinstance(one, Tensor) else one for one in arguments]  # may be changed in place
        function(*copies, **settings)  # the first call may compile the operator
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        out = function(*arguments, **settings)
        torch.accelerator.synchronize(device)
        if times is not None:
            times.append(time.perf_counter() - start)
        return out

    torch.accelerator.synchronize(device)  # earlier failures must not count against this operator
    npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
    with npu.stream(npu.SyncLaunchStream(device)):  # bypasses torch_npu's queue, which stops after a failure
        result, expected = trial(function if times is None else timed, device, dtype, *shape)
    torch.accelerator.synchronize(device)
    return float((result.float().cpu() - expected).abs().max())


def findings(device: torch.device) -> Iterator[Finding]:
    """Try every operator in the sizes of published models. Yield its difference from plain torch and its time."""
    for operator, shape in _SIZES.items():
        for dtype in HALF:
            subject, times, limit = f"{operator} {dtype}".replace("torch.", ""), list[float](), trials.LIMITS[dtype]
            try:
                difference = _difference(operator, device, dtype, *shape, times=times)
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                require_alive(device)
                yield Finding(subject, "warning", str(error).partition("\n")[0], _ADVICE)
                continue
            found = f"differs by {difference:.2g} (limit {limit:g}), {1e3 * max(times):.3f} ms"
            is_correct = difference <= limit
            yield Finding(subject, "ok" if is_correct else "warning", found, "" if is_correct else _ADVICE)


@cache
def _tell(operator: str, dtype: torch.dtype, failure: str, reason: str) -> None:
    """Log that an operator is not used. Results are cached, so each reason is logged only once for all shapes."""
    instead = _NEXT.get(operator, "plain torch")
    _log.warning("%s %s in %s; %s is used instead: %s", operator, failure, dtype, instead, reason)
