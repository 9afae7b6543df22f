"""Trials of fused operators: their results for random values, beside those of plain PyTorch in float32 on the host.

A trial returns both results. Each dtype has a limit on their difference, because float16 and bfloat16 round the inputs
of matrix products and the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from mindie_mm.device.joined_experts import ExpertWeights
from mindie_mm.device.kernels import Kernels, Rows
from mindie_mm.device.quantized_linear import QuantizedLinear, QuantizedWeight, StaticInput
from mindie_mm.device.transfer import Uploads

Results = tuple[Tensor, Tensor]
"""Result of the operator on the device, and the expected result in float32 on the host."""

LIMITS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest accepted difference of two elements, by dtype. Expected elements are mostly between -2 and 2."""

_LENGTHS = (511, 512, 513, 1025)
"""Sequence lengths in tokens. They lie on both sides of the block sizes that kernels use for keys."""
_COUNTS = (1, 3, 1, 130)
"""Row count of each sequence. Single rows are computed without a mask, all others with a mask."""
_SPARE_BLOCKS = 3


def attention(
    attend: Callable[[Tensor, Tensor, Tensor, Rows, float], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    block_size: int,
    *,
    has_rest: bool = True,
) -> Results:
    """Try causal attention to pages, as in `Kernels.attend`. The blocks are shuffled, and spare blocks contain NaN.

    If `has_rest` is false, also the rest of each sequence's last block is NaN.
    """
    random = torch.Generator().manual_seed(0)
    needed = [-(-length // block_size) for length in _LENGTHS]
    order = torch.randperm(sum(needed) + _SPARE_BLOCKS, generator=random)
    blocks = [part.tolist() for part in order[: sum(needed)].split(needed)]
    query = torch.randn(heads, sum(_COUNTS), width, generator=random).to(dtype)
    keys, values = (
        torch.randn(len(order), block_size, kv_heads, width, generator=random)
        .to(dtype)
        .index_fill_(0, order[sum(needed) :], torch.nan)
        for _ in range(2)
    )
    if not has_rest:
        for held, length in zip(blocks, _LENGTHS, strict=True):
            for pages in (keys, values):
                pages[held[-1], length - (len(held) - 1) * block_size :] = torch.nan
    scaling = 2 * width**-0.5  # weights a few keys in each row much more than the others
    rows = Rows.build(_COUNTS, _LENGTHS, blocks, block_size, Uploads(device))
    out = attend(query.to(device), keys.to(device), values.to(device), rows, scaling)
    expected = []
    for held, length, part in zip(blocks, _LENGTHS, query.float().split(_COUNTS, dim=1), strict=True):
        key, value = (pages[held].flatten(0, 1)[:length].transpose(0, 1).float() for pages in (keys, values))
        count = part.shape[1]
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        expected.append(scaled_dot_product_attention(part, key, value, attn_mask=seen, scale=scaling, enable_gqa=True))
    return out, torch.cat(expected, dim=1).transpose(0, 1)


def packed_attention(
    attend: Callable[[Tensor, Tensor, Tensor, Sequence[int], float], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    width: int,
) -> Results:
    """Try bidirectional attention within each of several packed sequences, with rows [T, heads, width]."""
    random = torch.Generator().manual_seed(0)
    bounds = [0, 1, 65, 576, 1089]
    query, key, value = (torch.randn(bounds[-1], heads, width, generator=random).to(dtype) for _ in range(3))
    scaling = 2 * width**-0.5
    out = attend(query.to(device), key.to(device), value.to(device), bounds[1:], scaling)
    q, k, v = (part.transpose(0, 1).float() for part in (query, key, value))
    expected = [
        scaled_dot_product_attention(q[:, start:stop], k[:, start:stop], v[:, start:stop], scale=scaling)
        for start, stop in pairwise(bounds)
    ]
    return out, torch.cat(expected, dim=1).transpose(0, 1)


def sdpa(attend: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, width: int) -> Results:
    """Try torch's attention as the layers call it: without a mask, causal with shared keys, and with a mask."""
    random = torch.Generator().manual_seed(0)
    outs, expected = [], []
    calls: list[tuple[int, int, int, dict[str, Any]]] = [
        (513, 513, 4, {}),
        (513, 513, 2, {"is_causal": True, "enable_gqa": True}),
        (130, 1025, 4, {"attn_mask": torch.ones(130, 1025, dtype=torch.bool).tril(895)}),
    ]
    for rows, keys, kv_heads, settings in calls:
        shapes = (1, 4, rows, width), (1, kv_heads, keys, width), (1, kv_heads, keys, width)
        given = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
        on_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in settings.items()}
        scaling = 2 * width**-0.5
        outs.append(attend(*(part.to(device) for part in given), scale=scaling, **on_device).flatten())
        q, k, v = (part.float() for part in given)
        expected.append(scaled_dot_product_attention(q, k, v, scale=scaling, **settings).flatten())
    return torch.cat(outs), torch.cat(expected)


def store(
    write: Callable[[tuple[Tensor, Tensor], Tensor, Tensor, Tensor], object],
    device: torch.device,
    dtype: torch.dtype,
    kv_heads: int,
    width: int,
    value_width: int,
) -> Results:
    """Try to write keys and values to pages of 16 tokens, as in `Kernels.store`, in an order that is not ascending."""
    random = torch.Generator().manual_seed(0)
    pages = [torch.randn(4, 16, kv_heads, one, generator=random).to(dtype) for one in (width, value_width)]
    new = [torch.randn(33, kv_heads, one, generator=random).to(dtype) for one in (width, value_width)]
    slots = torch.randperm(64, generator=random)[:33]
    keys, values = (part.to(device) for part in pages)
    write((keys, values), slots.to(device), *(part.to(device) for part in new))
    expected = [
        part.float().flatten(0, 1).index_copy(0, slots, own.float()) for part, own in zip(pages, new, strict=True)
    ]
    return torch.cat([keys.flatten(), values.flatten()]), torch.cat([part.flatten() for part in expected])


def rms_norm(
    normalize: Callable[[Tensor, Tensor, float], Tensor], device: torch.device, dtype: torch.dtype, *shape: int
) -> Results:
    """Try RMS normalization of rows of `shape`, which is also the shape of the weight."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, *shape, generator=random).to(dtype)
    weight = (torch.rand(*shape, generator=random) + 0.5).to(dtype)
    axes = tuple(range(1, hidden.dim()))
    scale = torch.rsqrt(hidden.float().square().mean(axes, keepdim=True) + 1e-6)
    return normalize(hidden.to(device), weight.to(device), 1e-6), hidden.float() * scale * weight.float()


def rotary(
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device, dtype: torch.dtype, width: int
) -> Results:
    """Try the rotation of values [2, 3, 33, width]. The first half of each head pairs with the second half."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, 33, width, generator=random).to(dtype)
    angles = (torch.rand(2, 1, 33, width // 2, generator=random) * 6).repeat(1, 1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = values.float().chunk(2, dim=-1)
    expected = values.float() * cos.float() + torch.cat([-second, first], dim=-1) * sin.float()
    return rotate(values.to(device), cos.to(device), sin.to(device)), expected


def add_rms_norm(
    normalize: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    width: int,
) -> Results:
    """Try the RMS normalization of a sum of rows [33, width], and the sum."""
    random = torch.Generator().manual_seed(0)
    hidden, added = (torch.randn(33, width, generator=random).to(dtype) for _ in range(2))
    weight = (torch.rand(width, generator=random) + 0.5).to(dtype)
    total = hidden.float() + added.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    out = normalize(hidden.to(device), added.to(device), weight.to(device), 1e-6)
    return torch.cat(out), torch.cat([total * scale * weight.float(), total])


def rotary_rows(
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
) -> Results:
    """Try the rotation of queries and keys, as in `Kernels.rotate`."""
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(33, count, width, generator=random).to(dtype) for count in (heads, kv_heads))
    angles = (torch.rand(33, width // 2, generator=random) * 6).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = Kernels().rotate(query.float(), key.float(), cos.float(), sin.float())
    out = rotate(*(part.to(device) for part in (query, key, cos, sin)))
    return torch.cat(out, 1), torch.cat(expected, 1)


def split(
    divide: Callable[[Tensor, Sequence[int]], list[Tensor]], device: torch.device, dtype: torch.dtype, *widths: int
) -> Results:
    """Try to split rows into contiguous parts with these widths."""
    joined = torch.randn(33, sum(widths), generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = divide(joined.to(device), widths)
    expected = joined.float().split_with_sizes([*widths], 1)
    return torch.cat([part.view(-1) for part in parts]), torch.cat([part.flatten() for part in expected])


def swiglu(activate: Callable[[Tensor], Tensor], device: torch.device, dtype: torch.dtype, width: int) -> Results:
    """Try the product of SiLU of the first half of rows [33, width] and the second half."""
    joined = (torch.randn(33, width, generator=torch.Generator().manual_seed(0)) / 2).to(dtype)
    return activate(joined.to(device)), Kernels().swiglu(joined.float())


def quantized(
    run: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, *, is_static: bool
) -> Results:
    """Try the product of rounded rows [33, inputs] with int8 weights, whose rows differ in scale."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(33, inputs, generator=random).to(dtype)
    values = torch.randint(-128, 128, (outputs, inputs), generator=random).to(torch.int8)
    scales = (torch.rand(outputs, generator=random) + 0.5) * inputs**-0.5 / 128
    if not is_static:
        bias = torch.randn(outputs, generator=random)
        weight = QuantizedWeight(values, scales.unsqueeze(1), rounds_input=True)
        out = run(*(part.to(device) for part in (rows, values, scales, bias)))
        return out, QuantizedLinear(weight, None).product(rows) + bias
    step, offset = 1 / 32, 3.0
    sums = torch.randint(-(2**12), 2**12, (outputs,), generator=random).int()
    static = StaticInput(step, offset, scales * step, sums, has_bias=True)
    weight = QuantizedWeight(values, scales.unsqueeze(1), rounds_input=True, static_input=static)
    factors = torch.full((inputs,), 1 / step), torch.full((inputs,), offset)
    out = run(*(part.to(device) for part in (rows, values, *factors, scales * step, sums)))
    return out, QuantizedLinear(weight, None).product(rows)


def experts(
    run: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    outputs: int,
    width: int,
    inner: int,
    *,
    rounds: bool,
) -> Results:
    """Try a mixture of six experts, as in `Kernels.experts`. One of them has no rows, and one has a single row.

    In a second call, the last two experts are those of another rank. If the experts round their inputs, their weights
    are int8.
    """
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, width, generator=random).to(dtype)
    first = (torch.randn(6, outputs, width, generator=random) * width**-0.5).to(dtype)
    second = (torch.randn(6, width, inner, generator=random) * 2 * inner**-0.5).to(dtype)
    scales: list[Tensor] = []
    if rounds:  # scales in powers of two are exact in bfloat16
        scales = [(weight.float().abs().amax(2) / 127).log2().ceil().exp2() for weight in (first, second)]
        rounded = zip((first, second), scales, strict=True)
        first, second = ((weight.float() / own.unsqueeze(2)).round().to(torch.int8) for weight, own in rounded)
    chosen = torch.tensor([0, 1, 3, 5])[torch.rand(33, 4, generator=random).argsort(1)[:, :2]]
    chosen[7, 1] = 4
    weights = torch.rand(chosen.shape, generator=random).to(dtype)
    outs, expected = [], []
    for count in (6, 4):
        kernels, is_share, own = Kernels(), count < len(first), chosen.clamp(max=count)
        activate: Callable[[Tensor], Tensor] = kernels.swiglu if outputs == 2 * inner else silu
        parts = [part[:count] for part in (first, second, *scales)]
        layer = _experts([part.to(device) for part in parts], activate, is_share=is_share)
        outs.append(run(*(part.to(device) for part in (hidden, own, weights)), layer))
        # Inner values of another dtype would be rounded to other integers.
        layer = _experts([part if rounds else part.float() for part in parts], activate, is_share=is_share)
        given = hidden if rounds else hidden.float()
        expected.append(kernels.experts(given, own, weights.float(), layer).float())
    return torch.cat(outs), torch.cat(expected)


def _experts(parts: Sequence[Tensor], activate: Callable[[Tensor], Tensor], *, is_share: bool) -> ExpertWeights:
    first, second, *scales = parts
    return ExpertWeights(first, second, activate, is_share, (scales[0], scales[1]) if scales else None)
