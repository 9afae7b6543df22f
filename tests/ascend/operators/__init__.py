"""Operators of the simulated NPU. The host computes the operators of the real torch_npu on the same memory."""

from __future__ import annotations

import warnings
from functools import cache

import torch


@cache
def install() -> dict[str, torch.library.Library]:
    """Replace torch_npu's kernels in this process. The returned libraries keep the replacements installed."""
    from tests.ascend.operators import aten, fused  # both import torch_npu, which may be missing at import

    libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "npu", "atb")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding kernels is intended, but causes warnings
        aten.install(libraries["aten"])
        fused.install(libraries)
    return libraries
