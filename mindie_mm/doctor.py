"""What of this machine is fine for serving, and what to do about what is not."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from mindie_mm.config import GiB, MiB, WorkerConfig
from mindie_mm.device import KINDS, open_device
from mindie_mm.errors import MindieMMError
from mindie_mm.models import family_of
from mindie_mm.nn.checkpoint import Checkpoint

MIN_OPEN_FILES = 1024
SHM = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    subject: str
    status: Literal["ok", "warning", "error"]
    found: str
    """What is there."""
    advice: str = ""
    """What to do about it; empty where it is fine."""


def examine(config: WorkerConfig) -> Iterator[Finding]:
    """Looks at everything that serving `config` needs, one finding at a time."""
    checks: tuple[Callable[[WorkerConfig], Finding], ...] = (
        _libraries,
        _device,
        _checkpoint,
        _shared_memory,
        _memory,
        _open_files,
    )
    for check in checks:
        yield check(config)


def _libraries(_: WorkerConfig) -> Finding:
    missing, found = [], [f"python {platform.python_version()}"]
    for name in ("torch", "transformers", "tokenizers", "numpy", "pillow", "simplejpeg", "av"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("libraries", "error", ", ".join(found), f"pip install {' '.join(missing)}")
    return Finding("libraries", "ok", ", ".join(found))


def _device(config: WorkerConfig) -> Finding:
    missing = {kind.name: reason for kind in KINDS if (reason := kind.missing()) is not None}
    absent = "; ".join(f"no {name}: {reason}" for name, reason in missing.items())
    try:
        device = open_device(config.engine.device)
    except MindieMMError as error:
        return Finding("device", "error", absent, str(error))
    free = device.free_bytes() / GiB
    return Finding(
        "device", "ok", f"{device.torch_device}, {free:.1f} GiB free, {torch.get_num_threads()} host threads; {absent}"
    )


def _checkpoint(config: WorkerConfig) -> Finding:
    try:
        checkpoint = Checkpoint.open(config.model)
        family = family_of(checkpoint, config.family)
    except MindieMMError as error:
        return Finding("checkpoint", "error", str(config.model or "embedded"), str(error))
    return Finding("checkpoint", "ok", f"{checkpoint.path} is served by {family.__name__}")


def _shared_memory(config: WorkerConfig) -> Finding:
    needed = config.num_tokenizers * config.arena_bytes
    if not os.access(SHM, os.W_OK):
        return Finding("shared memory", "error", f"{SHM} can't be written", "mount a tmpfs there")
    free = shutil.disk_usage(SHM).free
    found = f"{SHM} has {free / MiB:.0f} MiB free, {needed / MiB:.0f} MiB will be reserved"
    if free < needed:
        advice = "docker run --shm-size=2g; Kubernetes: emptyDir with medium Memory on /dev/shm; or --arena-bytes"
        return Finding("shared memory", "error", found, advice)
    return Finding("shared memory", "ok", found)


def _memory(config: WorkerConfig) -> Finding:
    free = open_device("cpu").free_bytes()
    needed = (config.engine.kv_cache_bytes or 0) + config.engine.encoder_cache_bytes
    found = f"{free / GiB:.1f} GiB available, the caches need {needed / GiB:.1f} GiB"
    if config.engine.device in ("auto", "cpu") and free < needed:
        return Finding("host memory", "warning", found, "lower --kv-cache-bytes or --encoder-cache-bytes")
    return Finding("host memory", "ok", found)


def _open_files(_: WorkerConfig) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        return Finding("open files", "warning", f"{soft} of at most {hard}", f"ulimit -n {MIN_OPEN_FILES} or more")
    return Finding("open files", "ok", str(soft))
