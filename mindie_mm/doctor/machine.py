"""Checks that a machine can run the service, with advice for each problem."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from collections.abc import Collection, Generator, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from mindie_mm.device import KINDS, SLOW_DTYPE, default_num_threads, open_device
from mindie_mm.device.finding import Finding
from mindie_mm.errors import InputError, LimitExceeded, MindieMMError
from mindie_mm.lockdown import support
from mindie_mm.models import family_of, reading, unknown_keys
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.lora.adapter import weights_file
from mindie_mm.nn.lora.adapter_config import read_config
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.weights.build import check_weight_files
from mindie_mm.settings.config import (
    EngineConfig,
    GiB,
    MiB,
    ServiceConfig,
    WorkerConfig,
    kind_of_name,
    require_media_dir,
)
from mindie_mm.settings.environment import default_spool
from mindie_mm.settings.sources import Configuration, misspelt_variables
from mindie_mm.shm import require_spool
from mindie_mm.shm.dev_shm import ShmSpace
from mindie_mm.shm.format.layout import SHM_DIRECTORY
from mindie_mm.shm.spool import require_locks
from mindie_mm.tokenize import Tokenizer

MIN_OPEN_FILES = 1024


def examine(configuration: Configuration, root: Path = Path("/"), *, operators: bool = False) -> Iterator[Finding]:
    """Check everything that the service needs to run with `configuration`. Yield the findings one by one.

    `root` is the root of the file system in which to look for drivers and libraries of accelerators. If `operators` is
    true, the device's fused operators are tried, too.
    """
    config, service = configuration.worker, configuration.service
    for message in misspelt_variables():
        yield Finding("settings", "warning", message, "unset it; `mindie-mm serve --help` lists all settings")
    yield _libraries()
    chosen = yield from _devices(config.engine, root, operators=operators)
    yield checkpoint_finding(config)
    yield from _loras(config)
    yield _shared_memory(config)
    yield _memory(config, chosen)
    yield _open_files()
    yield _decoders()
    yield _spool(service)
    if service.allowed_media_dir is not None:
        yield _media_folder(service)


def _libraries() -> Finding:
    missing, found = [], [f"python {platform.python_version()}"]
    for name in ("torch", "transformers", "tokenizers", "numpy", "pillow", "simplejpeg", "av"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("libraries", "error", ", ".join(found), f"pip install {' '.join(missing)}")
    return Finding("libraries", "ok", ", ".join(found))


def _devices(config: EngineConfig, root: Path, *, operators: bool) -> Generator[Finding, None, str | None]:
    """Yield a finding about the device in `config`, and then the findings about each kind of device.

    Return the name of the device, or None if it cannot be used.
    """
    report = {kind: list(kind.findings(root)) for kind in KINDS}
    broken = [kind.name for kind, findings in report.items() if any(one.status == "error" for one in findings)]
    device, chosen = _device(config.device, config.tensor_parallel, broken)
    yield device
    if device.status != "error":  # do not load a broken library
        yield from _dtype(chosen, config.dtype)
        yield from open_device(chosen).decode_steps()
        if operators:
            yield from open_device(chosen).operators()
    for kind, findings in report.items():
        for one in findings:
            # The service can start despite an error of a device that it does not use.
            spared = one.status == "error" and kind.name != kind_of_name(chosen)
            yield replace(one, status="warning") if spared else one
    return None if device.status == "error" else chosen


def _device(name: str, wanted: int, broken: Collection[str]) -> tuple[Finding, str]:
    """Return a finding about the device that `name` selects, and the name of this device. `name` may be auto.

    `broken` contains the names of the kinds of devices that have errors.
    """
    usable = [kind for kind in KINDS if kind.name not in broken]  # do not load a broken library
    missing = dict.fromkeys(broken, "see below") | {kind.name: reason for kind in usable if (reason := kind.missing())}
    absent = "; ".join(f"no {one}: {reason}" for one, reason in missing.items())
    chosen = next(kind.name for kind in KINDS if kind.name not in missing) if name == "auto" else name
    if kind_of_name(chosen) in broken:
        return Finding("device", "error", absent, f"see the findings about {kind_of_name(chosen)} below"), chosen
    try:
        device = open_device(chosen)
        torch_device = torch.empty(
            1, device=device.torch_device
        ).device  # creating a tensor starts the device, which reports some errors only then
        free = device.free_bytes() / GiB
    except (MindieMMError, RuntimeError) as error:
        return Finding("device", "error", absent, str(error)), chosen
    if torch_device.type != "cpu" and wanted > (count := torch.accelerator.device_count()):
        found = f"{count} devices are visible, but tensor_parallel is {wanted}"
        return Finding("device", "error", found, "lower tensor_parallel, or make more devices visible"), chosen
    found = f"{torch_device}, {free:.1f} GiB free, {default_num_threads()} host threads; {absent}"
    if name == "auto" and broken:
        advice = (
            f"use --device {chosen} if this is intended; otherwise see the findings about {' and '.join(broken)} below"
        )
        return Finding("device", "warning", found, advice), chosen
    return Finding("device", "ok", found), chosen


def _dtype(device: str, name: str) -> Iterator[Finding]:
    """Yield a warning if `device` has no instructions for the dtype `name`. `auto` never needs a warning."""
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and not open_device(device).multiplies(dtype):
        message = SLOW_DTYPE.format(dtype=name, device=device)
        yield Finding("dtype", "warning", message, "--dtype float32")


def checkpoint_finding(config: WorkerConfig) -> Finding:
    """Check the checkpoint's files without loading its weights."""
    try:
        checkpoint = Checkpoint.open(config.model)
        family = family_of(checkpoint, config.family)
        Tokenizer.from_pretrained(checkpoint.path, family=config.family).close()
        with reading(checkpoint, family):
            own_layers = not issubclass(family, PretrainedFamily)
            check_weight_files(family.translated(checkpoint), own_layers=own_layers)
            message = unknown_keys(checkpoint, family)
    except MindieMMError as error:
        return Finding("checkpoint", "error", str(config.model or "embedded"), str(error))
    return Finding("checkpoint", "ok", f"{checkpoint.path} is served by {family.__name__}", message)


def _loras(config: WorkerConfig) -> Iterator[Finding]:
    """Check the settings of LoRA adapters. Their shapes are checked when the model is loaded."""
    for name, folder in config.lora_folders.items():
        subject = f"LoRA adapter {name}"
        try:
            adapter, _ = read_config(folder)
            weights_file(folder)
            if adapter.most_rank > config.engine.max_lora_rank:
                limit = config.engine.max_lora_rank
                raise LimitExceeded(
                    f"the adapter has rank {adapter.most_rank}; the limit is {limit}. Raise max_lora_rank"
                )
            if config.engine.tensor_parallel > 1:
                raise InputError("adapters need --tensor-parallel 1")
        except MindieMMError as error:
            yield Finding(subject, "error", f"{folder} cannot be served", str(error))
            continue
        base = f" of {adapter.base}" if adapter.base else ""
        how = "torch runs the steps of its requests, without compiled code and graphs"
        yield Finding(subject, "ok", f"rank {adapter.most_rank}{base}; {how}")


def _shared_memory(config: WorkerConfig) -> Finding:
    needed = config.arena_bytes
    if not os.access(SHM_DIRECTORY, os.W_OK):
        return Finding("shared memory", "error", f"{SHM_DIRECTORY} is not writable", "mount a tmpfs there")
    space = ShmSpace.now()
    if why := space.why_no_file():
        return Finding("shared memory", "error", f"no file can be created in {SHM_DIRECTORY}", why)
    if (free := space.free_bytes) is None:  # `_memory` checks the host's memory instead
        return Finding(
            "shared memory", "ok", f"{SHM_DIRECTORY} has no size limit; {needed / MiB:.0f} MiB will be reserved"
        )
    found = f"{SHM_DIRECTORY} has {free / MiB:.0f} MiB free; {needed / MiB:.0f} MiB will be reserved"
    if free < needed:
        advice = (
            "enlarge it (docker run --shm-size=2g; Kubernetes: an emptyDir with medium Memory on /dev/shm), or "
            "lower --arena-bytes"
        )
        return Finding("shared memory", "error", found, advice)
    return Finding("shared memory", "ok", found)


def _memory(config: WorkerConfig, chosen: str | None) -> Finding:
    """Compare the weights and caches with the memory of the device `chosen`, or of the host if there is none."""
    engine = config.engine
    needed = (engine.kv_cache_bytes or 0) + engine.encoder_cache_bytes
    what = "the weights and caches need"
    try:
        needed += sum(file.stat().st_size for file in Checkpoint.open(config.model).weight_files())
    except MindieMMError:
        what = "the caches need"  # another finding says what is wrong with the checkpoint
    name = chosen or "cpu"
    subject = "host memory" if kind_of_name(name) == "cpu" else "device memory"
    try:
        free = open_device(name).free_bytes()
        if subject == "host memory" and ShmSpace.now().free_bytes is None:
            needed += config.arena_bytes
            what = what.replace(" and", ",").replace("caches", "caches and arenas")
    except MindieMMError as error:
        return Finding(subject, "error", "the free memory cannot be read", str(error))
    if subject == "device memory" and engine.tensor_parallel > 1:
        free *= engine.tensor_parallel
        what = f"on {engine.tensor_parallel} devices; {what}"
    found = f"{free / GiB:.1f} GiB available; {what} {needed / GiB:.1f} GiB"
    if chosen and free < needed:
        advice = "lower --kv-cache-bytes or --encoder-cache-bytes, or use a smaller checkpoint"
        return Finding(subject, "warning", found, advice)
    return Finding(subject, "ok", found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MIN_OPEN_FILES:  # the service raises its soft limit to the hard limit
        return Finding(
            "open files",
            "warning",
            f"soft limit {soft}, hard limit {hard}",
            f"raise the hard limit: ulimit -Hn {MIN_OPEN_FILES} or more",
        )
    return Finding("open files", "ok", f"soft limit {soft}, hard limit {hard}")


def _decoders() -> Finding:
    locks = support()
    if locks.missing:
        advice = (
            "run Linux 5.13 or later with lsm=landlock; the seccomp profile of a container must allow "
            "landlock_create_ruleset, landlock_restrict_self and seccomp"
        )
        return Finding("decoders", "warning", str(locks), advice)
    return Finding("decoders", "ok", str(locks))


def _spool(config: ServiceConfig) -> Finding:
    """Check that the spool can be written to and locked. If it is missing, check that it can be created."""
    spool = (config.spool or default_spool()).absolute()
    advice = "set --spool to a folder that only the service's user may write"
    try:
        require_spool(spool)
        folder = next(one for one in (spool, *spool.parents) if os.path.lexists(one))
        tempfile.TemporaryDirectory(dir=folder).cleanup()
        require_locks(folder)
    except MindieMMError as error:
        return Finding("spool", "error", str(error), advice)
    except OSError as error:
        return Finding("spool", "error", f"{spool} cannot be written: {error.strerror}", advice)
    return Finding("spool", "ok", f"{spool} can be {'written' if folder == spool else 'created'}")


def _media_folder(config: ServiceConfig) -> Finding:
    try:
        require_media_dir(config)
    except MindieMMError as error:
        return Finding("media folder", "error", str(error), "set --allowed-media-dir to a folder that exists")
    return Finding("media folder", "ok", f"requests may read files in {config.allowed_media_dir}")
