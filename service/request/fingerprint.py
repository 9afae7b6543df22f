"""The `system_fingerprint` of answers."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

import msgspec

from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import kind_of_name
from mindie_mm.worker.worker import Worker

_DECIDING = ("weights", "tensor_parallel", "vision_device", "vision_bits", "projector_device", "projector_bits")
"""Fields of `EngineConfig` that may change answers."""


def fingerprint(worker: Worker, model_name: str) -> str:
    """Return a hash of the checkpoint's settings, of this package's version and of the settings that change answers.

    With the same fingerprint and seed, a request gets the same answer.
    """
    engine = worker.config.engine
    given = [
        version("mindie_mm"),
        model_name,
        dict(Checkpoint.open(worker.config.model).config),
        worker.config.family,
        kind_of_name(worker.engine.info.device),
        worker.engine.info.dtype,
        msgspec.to_builtins(worker.default_sampling, str_keys=True),
        [kind_of_name(value) if isinstance(value := getattr(engine, name), str) else value for name in _DECIDING],
    ]
    return f"fp_{hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:10]}"
