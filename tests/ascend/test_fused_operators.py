"""Tests for torch_npu's own operators, called with their registered schemas, against plain attention and layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tests.ascend.processes import call

BF16 = torch.bfloat16
HEADS, KV_HEADS, WIDTH = 4, 2, 128
SCALE = 1 / math.sqrt(WIDTH)
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
"""The mask that sparse modes 2 to 4 require."""


def values(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Compute attention in float32: query [S, heads, dim], key and value [S, kv_heads, dim], `seen` [Sq, Skv]."""
    rows = (part.transpose(0, 1).unsqueeze(0).float() for part in (query, key, value))
    out = functional.scaled_dot_product_attention(*rows, attn_mask=seen, scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1)


def corner(queries: int, keys: int, before: int | None = None, after: int = 0) -> torch.Tensor:
    """Return which keys each query sees, bool [queries, keys]. The last query is aligned with the last key."""
    apart = torch.arange(keys) - (torch.arange(queries).unsqueeze(1) + keys - queries)
    return (apart <= after) & (apart >= -before if before is not None else True)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found.cpu().float() - expected).abs().max() < 0.02


# Lengths of the queries and keys of each sequence. The first sequence of "prefill" has 5 tokens in the cache.
BATCHES = {
    "prefill": ([7, 3, 20], [12, 3, 20]),
    "decode": ([1, 1, 1, 1], [130, 1, 128, 64]),
    "mixed": ([1, 9], [33, 9]),
}


class Batch:
    """Sequences of queries, and pages with their keys and values in shuffled blocks of 128 tokens."""

    def __init__(self, queries: list[int], keys: list[int]) -> None:
        self.queries, self.lengths = queries, keys
        self.query = [values(n, HEADS, WIDTH, seed=i) for i, n in enumerate(queries)]
        self.key = [values(n, KV_HEADS, WIDTH, seed=10 + i) for i, n in enumerate(keys)]
        self.value = [values(n, KV_HEADS, WIDTH, seed=20 + i) for i, n in enumerate(keys)]

    @property
    def stops(self) -> list[int]:
        return torch.tensor(self.queries).cumsum(0).tolist()

    @property
    def kv_stops(self) -> list[int]:
        return torch.tensor(self.lengths).cumsum(0).tolist()

    def pages(self, npu: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the pages of keys and of values [blocks, block_size, heads * dim], and the block table.

        Parts of the pages that belong to no token contain NaN.
        """
        count = sum(-(-n // 128) for n in self.lengths)
        free = list(range(count))[::-1]
        cache = [torch.full((count + 1, 128, KV_HEADS * WIDTH), torch.nan, dtype=BF16) for _ in range(2)]
        table = torch.full((len(self.lengths), max(-(-n // 128) for n in self.lengths)), count, dtype=torch.int32)
        for row, rows in enumerate(zip(self.key, self.value, strict=True)):
            for at in range(0, len(rows[0]), 128):
                block = table[row, at // 128] = free.pop()
                for pages, new in zip(cache, rows, strict=True):
                    pages[block, : len(new[at : at + 128])] = new[at : at + 128].flatten(1)
        return cache[0].to(npu), cache[1].to(npu), table.to(npu)

    def expected(self, seen) -> torch.Tensor:
        parts = zip(self.query, self.key, self.value, strict=True)
        return torch.cat([attended(q, k, v, seen(len(q), len(k))) for q, k, v in parts])


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("version", ["", "_v2"])
def test_packed_rows_over_pages_equal_plain_attention(npu, name, version):
    batch = Batch(*BATCHES[name])
    keys, vals, table = batch.pages(npu)
    settings = {"input_layout": "TND", "block_table": table, "block_size": 128, "num_key_value_heads": KV_HEADS}
    settings |= {"sparse_mode": 3, "atten_mask": TRIANGLE.to(npu)}
    query = torch.cat(batch.query).to(npu)
    if version:
        settings |= {"num_query_heads": HEADS, "softmax_scale": SCALE}
        settings |= {"actual_seq_qlen": batch.stops, "actual_seq_kvlen": batch.lengths}
        out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(query, keys, vals, **settings)
    else:
        settings |= {"num_heads": HEADS, "scale": SCALE}
        settings |= {"actual_seq_lengths": batch.stops, "actual_seq_lengths_kv": batch.lengths}
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(query, keys, vals, **settings)
    assert (out.dtype, out.device) == (BF16, npu)
    close(out, batch.expected(corner))


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, lambda queries, keys: None),
        ({"sparse_mode": 3, "atten_mask": TRIANGLE}, corner),
        ({"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tokens": 4, "next_tokens": 0}, lambda q, k: corner(q, k, 4)),
    ],
    ids=["all", "causal", "window"],
)
def test_packed_rows_and_their_log_sum_equal_plain_attention(npu, settings, seen):
    batch = Batch(*BATCHES["prefill"])
    rows = (torch.cat(part).to(npu) for part in (batch.query, batch.key, batch.value))
    out, lse = torch.ops.npu.npu_fused_infer_attention_score(
        *rows,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=SCALE,
        input_layout="TND",
        actual_seq_lengths=batch.stops,
        actual_seq_lengths_kv=batch.kv_stops,
        softmax_lse_flag=True,
        **{name: value.to(npu) if isinstance(value, torch.Tensor) else value for name, value in settings.items()},
    )
    close(out, batch.expected(seen))
    query, key = batch.query[1].float(), batch.key[1].float().repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->qhk", query, key) * SCALE
    if (mask := seen(3, 3)) is not None:
        scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    assert lse.dtype == torch.float32
    assert (lse.cpu()[7:10, :, 0] - scores.logsumexp(-1)).abs().max() < 1e-3


LAYOUTS = {
    "BSND": (lambda x: x, lambda x: x),
    "BSH": (lambda x: x.flatten(2), lambda x: x.unflatten(2, (-1, WIDTH))),
    "BNSD": (lambda x: x.transpose(1, 2).contiguous(), lambda x: x.transpose(1, 2)),
    "BNSD_BSND": (lambda x: x.transpose(1, 2).contiguous(), lambda x: x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["all", "own mask", "upper left", "lower right", "lengths"])
def test_layouts_with_a_batch_axis_equal_plain_attention(npu, layout, mode):
    there, back = LAYOUTS[layout]
    query, key, value = values(2, 6, HEADS, WIDTH), values(2, 9, KV_HEADS, WIDTH), values(2, 9, KV_HEADS, WIDTH, seed=5)
    mask = values(2, 6, 9, dtype=torch.float32) > 0.5
    mask[..., 0] = False
    settings, seen = {
        "all": ({}, [None] * 2),
        "own mask": ({"sparse_mode": 1, "atten_mask": mask.unsqueeze(1)}, list(~mask)),
        "upper left": ({"sparse_mode": 2, "atten_mask": TRIANGLE}, [torch.ones(6, 9, dtype=torch.bool).tril()] * 2),
        "lower right": ({"sparse_mode": 3, "atten_mask": TRIANGLE}, [corner(6, 9)] * 2),
        "lengths": ({"actual_seq_lengths_kv": [9, 4]}, [None, (torch.arange(9) < 4).expand(6, 9)]),
    }[mode]
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        *(there(part).to(npu) for part in (query, key, value)),
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=SCALE,
        input_layout=layout,
        **{name: value.to(npu) if isinstance(value, torch.Tensor) else value for name, value in settings.items()},
    )
    expected = torch.stack([attended(q, k, v, s) for q, k, v, s in zip(query, key, value, seen, strict=True)])
    close(back(out), expected)


def test_a_single_query_per_sequence_sees_all_keys_in_every_mode(npu):
    """In layouts with a batch axis, the window is ignored."""
    batch = Batch(*BATCHES["decode"])
    keys, vals, table = batch.pages(npu)
    for settings in ({}, {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 0, "atten_mask": TRIANGLE.to(npu)}):
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(
            torch.cat(batch.query).flatten(1).unsqueeze(1).to(npu),
            keys,
            vals,
            num_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            scale=SCALE,
            input_layout="BSH",
            actual_seq_lengths_kv=batch.lengths,
            block_table=table,
            block_size=128,
            **({} if not settings else settings | {"atten_mask": torch.zeros(4, 256, dtype=torch.bool, device=npu)}),
        )
        close(out.view(4, HEADS, WIDTH), batch.expected(lambda queries, keys: None))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_training_attention_over_packed_rows_equals_plain_attention(npu, dtype, causal):
    """As in towers, heads may have any width, and float32 is allowed."""
    rows = [values(14, HEADS, 20, seed=seed, dtype=dtype) for seed in range(3)]
    stops = [5, 5, 14]  # the second sequence is empty
    settings = {"sparse_mode": 3, "atten_mask": TRIANGLE.to(npu)} if causal else {}
    out, largest, total, *rest = torch.ops.npu.npu_fusion_attention(
        *(part.to(npu) for part in rows),
        HEADS,
        "TND",
        scale=SCALE,
        actual_seq_qlen=stops,
        actual_seq_kvlen=stops,
        **settings,
    )
    expected = torch.cat(
        [
            attended(*(part[a:b] for part in rows), corner(b - a, b - a) if causal else None)
            for a, b in ((0, 5), (5, 14))
        ]
    )
    assert out.dtype == dtype
    close(out, expected)
    assert largest.shape == total.shape == (14, HEADS, 8)
    assert rest[1:] == [0, 0, 0]


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH", "SBH"])
def test_training_attention_with_a_batch_axis_equals_plain_attention(npu, layout):
    rows = [values(2, 6, HEADS, 16, seed=seed) for seed in range(3)]
    there = {
        "BSND": lambda x: x,
        "BNSD": lambda x: x.transpose(1, 2),
        "BSH": lambda x: x.flatten(2),
        "SBH": lambda x: x.flatten(2).transpose(0, 1),
    }[layout]
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    out, *_ = torch.ops.npu.npu_fusion_attention(
        *(there(part).to(npu) for part in rows), HEADS, layout, scale=SCALE, atten_mask=mask.to(npu), next_tockens=0
    )
    expected = torch.stack([attended(*(part[i] for part in rows), ~mask) for i in range(2)])
    close(out, there(expected))


def test_norms_equal_those_of_torch(npu):
    hidden, other, gamma = values(5, 32), values(5, 32, seed=1), values(32)
    total = (hidden + other).float()
    for found, rows in (
        (torch.ops.npu.npu_rms_norm(hidden.to(npu), gamma.to(npu), 1e-5), hidden.float()),
        (torch.ops.npu.npu_add_rms_norm(*(part.to(npu) for part in (hidden, other, gamma)), 1e-5), total),
    ):
        expected = functional.rms_norm(rows, (32,), gamma.float(), 1e-5)
        assert (found[0].cpu().float() - expected).abs().max() < 0.04
        assert found[1].dtype == torch.float32
        assert torch.allclose(found[1].cpu(), (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
    assert torch.equal(found[2].cpu(), hidden + other)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotations_equal_complex_products(npu, mode):
    rows, angles = values(1, 7, 3, 16, dtype=torch.float32), values(7, 8, dtype=torch.float32)
    first, second = rows.chunk(2, -1) if mode == "half" else (rows[..., ::2], rows[..., 1::2])
    turned = torch.complex(first, second) * torch.polar(torch.ones(7, 1, 8), angles.unsqueeze(1))
    parts = turned.real, turned.imag
    expected = torch.cat(parts, -1) if mode == "half" else torch.stack(parts, -1).flatten(-2)
    wide = torch.cat([angles] * 2, -1) if mode == "half" else angles.repeat_interleave(2, -1)
    cos, sin = (part.view(1, 7, 1, 16).to(npu) for part in (wide.cos(), wide.sin()))
    assert torch.allclose(torch.ops.npu.npu_rotary_mul(rows.to(npu), cos, sin, mode).cpu(), expected, atol=1e-6)


def test_in_place_rotations_equal_rotations_into_new_tensors(npu):
    query, key = values(2, 3, 4, 64), values(2, 3, 1, 64)
    cos, sin = values(2, 3, 1, 64, seed=3).to(npu), values(2, 3, 1, 64, seed=4).to(npu)
    expected = [torch.ops.npu.npu_rotary_mul(part.to(npu), cos, sin).cpu() for part in (query, key)]
    given = query.to(npu), key.to(npu)
    found = torch.ops.npu.npu_apply_rotary_pos_emb(*given, cos, sin)
    for rows, out, target in zip(given, found, expected, strict=True):
        assert torch.equal(rows.cpu(), target)
        assert torch.equal(out.cpu(), target)


def test_activations_equal_their_formulas(npu):
    rows = values(3, 8, dtype=torch.float32)
    gate, up = rows.chunk(2, -1)
    assert torch.allclose(torch.ops.npu.npu_swiglu(rows.to(npu)).cpu(), functional.silu(gate) * up)
    assert torch.allclose(torch.ops.npu.npu_silu(rows.to(npu)).cpu(), functional.silu(rows))
    assert torch.allclose(torch.ops.npu.fast_gelu(rows.to(npu)).cpu(), rows * torch.sigmoid(1.702 * rows), atol=1e-6)


def test_all_operators_that_write_to_the_cache_give_the_same_pages(npu):
    """Four operators write the same pages."""
    import torch_npu

    key, value = values(5, KV_HEADS, 16), values(5, KV_HEADS, 16, seed=1)
    slots = torch.tensor([9, 3, 4, 0, 30])
    expected = torch.zeros(4, 8, KV_HEADS, 16, dtype=BF16)
    expected.view(32, KV_HEADS, 16)[slots] = key
    caches = [torch.zeros(4, 8, KV_HEADS, 16, dtype=BF16, device=npu) for _ in range(6)]
    rows = key.to(npu), value.to(npu)
    torch.ops.npu.npu_scatter_nd_update_(caches[0].view(32, KV_HEADS, 16), slots.unsqueeze(1).to(npu), rows[0])
    torch_npu._npu_reshape_and_cache(*rows, caches[1], caches[2], slots.int().to(npu))
    torch.ops.npu.npu_scatter_pa_kv_cache(*rows, caches[3], caches[4], slots.int().to(npu), cache_mode="Norm")
    caches[5].view(32, KV_HEADS, 16).index_copy_(0, slots.to(npu), rows[0])
    for written in (caches[0], caches[1], caches[3], caches[5]):
        assert torch.equal(written.cpu(), expected)
    assert torch.equal(caches[2].cpu(), caches[4].cpu())
    functional_one = torch.ops.npu.npu_scatter_nd_update(
        torch.zeros_like(caches[0]).view(32, KV_HEADS, 16), slots.unsqueeze(1).to(npu), rows[0]
    )
    assert torch.equal(functional_one.cpu().view_as(expected), expected)


def test_a_cache_in_the_nz_format_is_written_in_its_order(npu):
    """Pages are written in the NZ format, which fused attention can read."""
    key, value, query = (values(4, 1, 32, seed=seed) for seed in range(3))
    pages = [torch.zeros(2, 2, 16, 16, dtype=BF16, device=npu) for _ in range(2)]
    slots = torch.tensor([16, 17, 18, 19], dtype=torch.int32, device=npu)
    torch.ops.npu.npu_scatter_pa_kv_cache(key.to(npu), value.to(npu), *pages, slots)
    for rows, written in ((key, pages[0]), (value, pages[1])):
        assert torch.equal(written[1, :, :4].cpu(), rows.view(4, 2, 16).transpose(0, 1))
    assert query.shape == (4, 1, 32)


def test_a_cast_records_the_format_of_a_tensor(npu):
    import torch_npu

    weight = values(32, 32).to(npu)
    assert torch_npu.get_npu_format(weight) == 2
    cast = torch_npu.npu_format_cast(weight, 29)
    assert torch_npu.get_npu_format(cast) == 29
    assert torch.equal(cast.cpu(), weight.cpu())
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast(cast, weight)) == 2


def test_an_operator_or_argument_that_is_not_simulated_raises(npu):
    with pytest.raises(RuntimeError, match="npu_geglu is not simulated"):
        torch.ops.npu.npu_geglu(values(2, 4).to(npu))
    rows = values(1, 2, 4, 16).to(npu)
    with pytest.raises(NotImplementedError, match="quant_scale2 is given"):
        torch.ops.npu.npu_fused_infer_attention_score(
            rows, rows, rows, num_heads=4, input_layout="BSND", quant_scale2=torch.ones(1, device=npu)
        )


def missing() -> dict[str, str]:
    import torch_npu

    rows = values(3, 2, 128).to("npu")
    calls = {
        "npu_fused_infer_attention_score": lambda: torch_npu.npu_fused_infer_attention_score(
            rows, rows, rows, num_heads=2, input_layout="TND", actual_seq_lengths=[3], actual_seq_lengths_kv=[3]
        ),
        "npu_rms_norm": lambda: torch_npu.npu_rms_norm(rows, rows[0, 0]),
        "npu_swiglu": lambda: torch_npu.npu_swiglu(rows),
    }
    found = {}
    for name, operator in calls.items():
        try:
            operator()
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error)
    return found


def test_an_operator_that_cann_lacks_raises(npu):
    """The error is torch_npu's own, as with an older CANN."""
    found = call(missing, missing="npu_fused_infer_attention_score,npu_rms_norm")
    assert found["npu_swiglu"] == ""
    assert found["npu_fused_infer_attention_score"].startswith("aclnnFusedInferAttentionScore")
    assert found["npu_rms_norm"].startswith("aclnnRmsNorm or ")
    for name in ("npu_fused_infer_attention_score", "npu_rms_norm"):
        assert "not in libopapi.so" in found[name]
