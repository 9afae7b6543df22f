"""What the rest of the package may ask of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Device(ABC):
    """One kind of device."""

    name: ClassVar[str]
    """What --device takes."""

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why it can't be used here, in words for an operator; None if it can."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where tensors go."""

    @abstractmethod
    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """The dtype that `auto` means for a checkpoint stored as `checkpoint_dtype`."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that a model and its cache may still take."""

    def set_num_threads(self, count: int) -> None:
        """Host threads for compute; 0 keeps torch's choice."""
        if count:
            torch.set_num_threads(count)
