"""Modules of the package that no code has used yet, for workers that are forked from this process.

A worker must not see the state of the process that it is forked from. To import the package again would take 0.3 s of
processor time in each worker, and to fill the caches of transformers would take more. The import of this module does
both once, before the fork.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from transformers import conversion_mapping
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni  # noqa: F401 - of the embedded checkpoint
from transformers.models.qwen2_vl import modeling_qwen2_vl  # noqa: F401 - of the random checkpoints

from tests import warm
from tests.kept_steps import keep_steps

_WORKERS = (
    "mindie_mm.decode.nursery",
    "mindie_mm.engine.process.engine_process",
    "mindie_mm.tokenize.stage.tokenizer_process",
)


def _imported() -> dict[str, ModuleType]:
    """Import the workers' modules anew, and return the modules without using them."""
    used = warm.own_modules()
    warm.replace_own_modules({})
    try:
        for name in _WORKERS:
            importlib.import_module(name)
        keep_steps(sys.modules["mindie_mm.engine.process.engine_process"])
        return warm.own_modules()
    finally:
        warm.replace_own_modules(used)


conversion_mapping.get_checkpoint_conversion_mapping("")  # fills a cache of a thousand regular expressions
UNUSED = [_imported() for _ in range(2)]
"""The modules of a worker, and the modules of the worker that it starts."""
