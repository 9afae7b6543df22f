"""A multimodal serving worker: token ids carry references to pixels in shared memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindie_mm.engine.llm import LLM, Output
    from mindie_mm.engine.sampling_params import SamplingParams

__all__ = ["LLM", "Output", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "mindie_mm.engine.llm",
    "Output": "mindie_mm.engine.llm",
    "SamplingParams": "mindie_mm.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    # Late, because whoever wants `mindie_mm.shm` alone should not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
