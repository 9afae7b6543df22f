"""Tests for the table of products and releases of CANN: which operators, dtypes and widths each of them supports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ascend import test_limits as limits
from tests.ascend.operators.limits import Refused
from tests.ascend.operators.product_limits import LIMITS
from tests.ascend.processes import call

FP16, BF16 = torch.float16, torch.bfloat16


def rows(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def cached(npu: torch.device) -> None:
    new, pages, slots = rows(2, 2, 16).to(npu), rows(2, 8, 2, 16).to(npu), limits.SLOT.to(npu)
    torch.ops.npu.npu_scatter_pa_kv_cache(new, new, pages, pages.clone(), slots, cache_mode="Norm")


_ROWS = ("query", "key", "value")
CALLS: dict[str, tuple[Any, Any]] = {
    "packed pages": (limits.fused, {}),
    "packed keys of 128": (limits.unpaged, {}),
    "packed keys of 192": (limits.unpaged, {name: limits.zeros(2, 4, 192) for name in _ROWS}),
    "a batch of keys": (limits.prefill, {}),
    "packed training": (limits.training, {}),
    "a batch of training": (limits.training, limits.BNSD),
    "rows in a cache": (cached, {}),
    "copied rows": (limits.plain("aten::index_copy_"), (rows(4, 2), 0, limits.INDEX[:, 0], rows(2, 2))),
    "scattered rows": (limits.SCATTER, (rows(4, 2), limits.INDEX, rows(2, 2))),
    "scattered rows of int8": (
        limits.SCATTER,
        (rows(4, 2, dtype=torch.int8), limits.INDEX, rows(2, 2, dtype=torch.int8)),
    ),
    "an MLP of 32": (limits.SWIGLU, (rows(2, 32),)),
    "an MLP of 48": (limits.SWIGLU, (rows(2, 48),)),
    "routed rows": (limits.routed, {}),
    "a norm": (limits.NORM, (rows(2, 8), rows(8))),
    "a norm of bfloat16": (limits.NORM, (rows(2, 8, dtype=BF16), rows(8, dtype=BF16))),
    "products": (limits.MM, (rows(2, 2), rows(2, 2))),
    "products of bfloat16": (limits.MM, (rows(2, 2, dtype=BF16), rows(2, 2, dtype=BF16))),
}


def refusals() -> dict[str, str]:
    """Return the calls that this process's product and CANN refuse, with the sources of the limits."""
    import torch_npu  # noqa: F401

    found = {}
    for name, (launch, given) in CALLS.items():
        try:
            limits.ask(launch, torch.device("npu:0"), given)
        except Refused as refused:
            found[name] = refused.limit.source
    return found


REFUSED = {
    ("Ascend910B1", "9.1.0"): set(),
    ("Ascend910B4", "8.3.0"): {"packed pages", "packed keys of 128"},
    ("Ascend910_9392", "9.1.0"): set(),
    ("Ascend910_9392", "8.5.0"): {"packed training"},
    ("Ascend310P3", "9.1.0"): {
        *("packed pages", "packed keys of 128", "packed keys of 192", "a batch of keys", "packed training"),
        *("a batch of training", "rows in a cache", "copied rows", "scattered rows of int8", "an MLP of 48"),
        *("routed rows", "a norm of bfloat16", "products of bfloat16"),
    },
}


def test_products_and_releases_of_cann_refuse_the_calls_of_the_table():
    sources = set()
    for (soc, cann), expected in REFUSED.items():
        found = call(refusals, soc=soc, cann=cann)
        assert found.keys() == expected, (soc, cann)
        sources.update(found.values())
    assert {limit.source for limit in LIMITS} == sources


@pytest.mark.parametrize(("soc", "cann"), [("Ascend310P3", "9.1.0"), ("Ascend910B4", "8.3.0")])
def test_a_refused_width_or_operator_is_replaced(soc, cann):
    """Attention in packed rows of 128 is refused, so it is not used."""
    assert call(packs, soc=soc, cann=cann) is False


def packs() -> bool:
    import torch_npu  # noqa: F401

    from mindie_mm.device.npu.npu_kernels import works

    return works("npu_fused_infer_attention_score (TND)", torch.device("npu:0"), FP16, 4, 2, 128, 128)
