"""Devices that run models. No other package names a device or imports an accelerator's library."""

from __future__ import annotations

import logging
import re
from functools import cache

import torch

from mindie_mm.device import host_memory, joined_experts
from mindie_mm.device.alive import require_alive
from mindie_mm.device.base import Device, default_num_threads
from mindie_mm.device.cpu import CPU
from mindie_mm.device.cpu.onednn_linear import OneDNNLinear
from mindie_mm.device.cpu.wide_linear import WideLinear
from mindie_mm.device.cuda import CUDA
from mindie_mm.device.joined_experts import ExpertWeights
from mindie_mm.device.kernels import Kernels, Rows, block_table
from mindie_mm.device.npu import NPU
from mindie_mm.device.quantized_linear import FLOAT8, QuantizedLinear, QuantizedWeight, StaticInput
from mindie_mm.device.transfer import Download, Uploads, download, overwrite, upload
from mindie_mm.errors import DeviceError, InputError

KINDS: tuple[type[Device], ...] = (NPU, CUDA, CPU)
"""All kinds of devices, in order of preference for `auto`."""


_log = logging.getLogger(__name__)

_NAME = re.compile(r"([a-z]+)(?::(0|[1-9][0-9]{0,3}))?", re.ASCII)
LIBRARIES = ("torch_npu",)
"""Packages other than torch whose versions affect the results of a device."""
SLOW_DTYPE = "the {device} has no {dtype} instructions; inference is several times slower than in float32"
"""Warning about a dtype that the device has no instructions for."""


def open_device(name: str = "auto") -> Device:
    """Open the device `name`. The name "auto" selects the first available accelerator, or else the CPU.

    A name may end with an index among the visible devices, such as cuda:1. Without an index, it means the current
    device of its kind.

    Raises:
        InputError: The name is unknown.
        DeviceError: The device cannot be used. The message gives the reason, or the devices that exist.

    """
    if not isinstance(name, str):
        raise InputError(f"device is of type {type(name).__name__}; it must be a string")
    if name == "auto":
        return _first_available()()
    if match := _NAME.fullmatch(name):
        index = None if match[2] is None else int(match[2])
        for kind in KINDS:
            if kind.name == match[1]:
                if reason := kind.missing():
                    raise DeviceError(f"the device {name} cannot be used: {reason}")
                if index is not None and index >= (count := kind.count()):
                    visible = ", ".join(f"{kind.name}:{number}" for number in range(count))
                    raise DeviceError(f"there is no device {name}; the visible devices are {visible}")
                return kind(index)
    names = ", ".join(kind.name for kind in KINDS)
    raise InputError(
        f"device={name!r} must be one of auto, {names}, or a name with an index, such as {KINDS[0].name}:1"
    )


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether a module is a linear layer and nothing else. Subclasses of nn.Linear may do more."""
    return type(module) is torch.nn.Linear or isinstance(module, OneDNNLinear | WideLinear | QuantizedLinear)


def require_possible(name: str) -> None:
    """Raise the error of `open_device` if the name is unknown or this machine cannot have such a device.

    Unlike `open_device`, do not load the runtime of a device that may exist.
    """
    if not any(kind.name == name.partition(":")[0] and kind.may_exist() for kind in KINDS):
        open_device(name)


def bind_tokenizer(name: str) -> None:
    """Bind this thread and its later children to CPUs near the devices `name`, without loading their runtime."""
    chosen = (kind for kind in KINDS if name.partition(":")[0] == kind.name or (name == "auto" and kind.may_exist()))
    next(chosen, CPU).bind_tokenizer()  # the engine refuses an unknown name


def forkable() -> list[str]:
    """Return the values of the setting `device` that let an engine run in a forked process.

    "auto" is one of them if it can only select such a device. No device's runtime is loaded.
    """
    names = [kind.name for kind in KINDS if kind.survives_fork]
    return names if any(kind.may_exist() for kind in KINDS if not kind.survives_fork) else [*names, "auto"]


@cache
def kind_of(device: torch.device) -> type[Device]:
    """Return the kind of `device`."""
    return next(kind for kind in KINDS if kind.name == device.type)


def slow_dtype(module: torch.nn.Module) -> str | None:
    """Return a warning if the device of some weights has no instructions for their dtype. Otherwise, return None."""
    for device, dtype in {(weight.device, weight.dtype) for weight in module.parameters()}:
        kind = kind_of(device)
        if not kind(device.index).multiplies(dtype):
            return SLOW_DTYPE.format(dtype=str(dtype).removeprefix("torch."), device=kind.name)
    return None


def kernels_of(device: torch.device) -> Kernels:
    """Return the fused operators of `device`."""
    return kind_of(device).kernels


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros on `device`. On the CPU, their pages take no memory until they are written."""
    if device.type == CPU.name:
        return host_memory.zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _first_available() -> type[Device]:
    """Return the kind of device for `auto`."""
    for kind in KINDS:
        if (reason := kind.missing()) is None:
            break
        if kind.may_exist():
            _warn_of_unused(kind.name, reason)
    return kind


@cache
def _warn_of_unused(name: str, reason: str) -> None:
    """Log once why an accelerator is not used although its runtime is installed."""
    _log.warning("the device %s is not used: %s", name, reason)


__all__ = [
    "FLOAT8",
    "KINDS",
    "LIBRARIES",
    "SLOW_DTYPE",
    "Device",
    "Download",
    "ExpertWeights",
    "Kernels",
    "QuantizedLinear",
    "QuantizedWeight",
    "Rows",
    "StaticInput",
    "Uploads",
    "bind_tokenizer",
    "block_table",
    "default_num_threads",
    "download",
    "forkable",
    "is_linear",
    "joined_experts",
    "kernels_of",
    "kind_of",
    "open_device",
    "overwrite",
    "require_alive",
    "require_possible",
    "slow_dtype",
    "upload",
    "zeros",
]
