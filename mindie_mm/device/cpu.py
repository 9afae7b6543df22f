"""The CPU: always there."""

from __future__ import annotations

from typing import ClassVar

import psutil
import torch

from mindie_mm.device.base import Device


class CPU(Device):
    """The host's processor, in float32 unless asked otherwise."""

    name: ClassVar[str] = "cpu"

    @classmethod
    def missing(cls) -> str | None:
        return None

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        del checkpoint_dtype  # bfloat16 is slower than float32 on most hosts, and less exact on all
        return torch.float32

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)
