"""The CPU: always there."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from mindie_mm.device import cpu_attention, host_memory
from mindie_mm.device.base import Device
from mindie_mm.device.cpu_layers import lighten
from mindie_mm.device.packed_linear import pack


class CPU(Device):
    """The host's processor, in float32 unless asked otherwise."""

    name: ClassVar[str] = "cpu"
    memory_share: ClassVar[float] = 0.5  # other processes live in the same memory, and shared memory does
    measure_s: ClassVar[float] = 0.5

    @classmethod
    def missing(cls) -> str | None:
        return None

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        # bfloat16 is slower than float32 on most hosts, and less exact on all
        return torch.float32

    def prepare(self, module: torch.nn.Module) -> None:
        host_memory.keep_freed()
        pack(module)
        lighten(module)
        cpu_attention.replace(module)

    def free_bytes(self) -> int:
        return host_memory.available_bytes()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        return host_memory.peak_bytes(work)
