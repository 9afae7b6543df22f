"""Operators of the simulated NPU: the real torch_npu's, answered by the host over the same memory."""

from __future__ import annotations

import warnings
from functools import cache

import torch


@cache
def install() -> dict[str, torch.library.Library]:
    """Puts the operators in place of torch_npu's kernels, for this process. What it returns keeps them there."""
    from tests.ascend.operators import aten, fused  # both need torch_npu, which is not wherever this package is read

    libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "npu", "atb")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are overridden: that is what is meant
        aten.install(libraries["aten"])
        fused.install(libraries)
    return libraries
