"""The memory of the largest step of engines on the CPU, computed once for each checkpoint and each group of settings.

The memory depends on the checkpoint and the settings only (docs/decisions/0016-memory-is-computed.md), and takes a
second of processor time to compute. An engine takes it from an earlier engine of the same checkpoint and settings, in
the way in which a restarted engine takes it from its predecessor. tests/engine/test_memory_profile.py tests the
computation itself.
"""

from __future__ import annotations

import mmap
import os
import struct
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

_RECORD = struct.Struct("<16sQ16s")
"""Digest of the checkpoint and the settings, number of bytes, digest of both."""
_NUM_RECORDS = 1024
_OF_CACHES = {"kv_cache_bytes", "memory_share", "encoder_cache_bytes", "prefix_caching", "step_timeout_s"}
"""Settings of the engine that the memory of its steps does not depend on."""
_records = mmap.mmap(-1, _NUM_RECORDS * _RECORD.size)
"""Memory that this process shares with the processes that are forked from it."""


def keep_steps(engine_process: ModuleType) -> None:
    """Let the module's engines take the memory of their largest steps from engines with equal checkpoints."""
    engine_process.load_engine = partial(_load, engine_process.load_engine)  # type: ignore[attr-defined]


def _load(load: Any, start: Any, ranks: Any) -> Any:
    if start.step_bytes is not None or ranks.count > 1 or not ranks.open_device(start.config.device).computes_peaks:
        return load(start, ranks)
    key = _key(start)
    loaded = load(msgspec.structs.replace(start, step_bytes=_find(key)), ranks)
    _keep(key, loaded[1])
    return loaded


def _key(start: Any) -> bytes:
    """Return a digest of the settings and of the checkpoint, except the values of the weights."""
    settings = msgspec.to_builtins(start.config)
    given = {name: value for name, value in settings.items() if name not in _OF_CACHES}, start.family
    given = *given, start.loras is not None
    digest = blake2b(msgspec.msgpack.encode(given), digest_size=16)
    digest.update(os.environ.get("MINDIE_MM_KERNELS", "").encode())
    for file in sorted(Path(start.model).iterdir()) if start.model else ():
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        if file.suffix == ".json":
            digest.update(file.read_bytes())
    return digest.digest()


def _place(key: bytes) -> int:
    return int.from_bytes(key[:4], "little") % _NUM_RECORDS * _RECORD.size


def _find(key: bytes) -> int | None:
    found, num_bytes, check = _RECORD.unpack_from(_records, _place(key))
    return num_bytes if (found, check) == (key, _check(key, num_bytes)) else None


def _keep(key: bytes, num_bytes: int) -> None:
    _RECORD.pack_into(_records, _place(key), key, num_bytes, _check(key, num_bytes))


def _check(key: bytes, num_bytes: int) -> bytes:
    """Return a digest that shows whether two processes have written parts of one record."""
    return blake2b(key + num_bytes.to_bytes(8, "little"), digest_size=16).digest()
