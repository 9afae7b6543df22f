"""Operators of the simulated NPU. The host computes the operators of the real torch_npu in the device's memory."""

from __future__ import annotations

import warnings
from functools import cache

import torch


@cache
def install() -> dict[str, torch.library.Library]:
    """Replace torch_npu's kernels in this process. They stay replaced as long as the returned libraries exist."""
    # Both import torch_npu, which may not be installed when this module is imported.
    from tests.ascend.operators import aten, fused

    libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "npu", "atb")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacing kernels is intended, but torch warns about it
        aten.install(libraries["aten"])
        fused.install(libraries)
    return libraries
