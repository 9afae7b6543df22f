"""NVIDIA GPUs through torch's own build for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import torch

from mindie_mm.device.base import Device, allocator_peak_bytes


class CUDA(Device):
    """The current CUDA device, in the checkpoint's own dtype."""

    name: ClassVar[str] = "cuda"
    memory_share: ClassVar[float] = 0.9
    measure_s: ClassVar[float] = 10.0

    @classmethod
    def missing(cls) -> str | None:
        if torch.version.cuda is None:
            return (
                f"this torch ({torch.__version__}) is built without CUDA; pytorch.org/get-started names the one with it"
            )
        if torch.cuda.is_available():
            return None
        try:
            torch.cuda.init()  # says why: an old driver, or none
        except RuntimeError as error:
            return f"{error}; see nvidia-smi, and in a container whether it was given the GPUs (--gpus all)"
        return "no CUDA device is visible, see nvidia-smi and CUDA_VISIBLE_DEVICES"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return checkpoint_dtype

    @classmethod
    def pin(cls, address: int, num_bytes: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) == 0:
            return True
        with suppress(RuntimeError):  # the driver keeps the error for the next kernel: let it be this one
            torch.zeros(1, device=torch.device("cuda"))
        return False

    @classmethod
    def unpin(cls, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        return allocator_peak_bytes(torch.cuda, work)
