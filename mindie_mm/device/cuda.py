"""NVIDIA GPUs through torch's own build for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import ClassVar
from weakref import WeakSet

import torch

from mindie_mm.device.base import Device, allocator_peak_bytes


class CUDA(Device):
    """The current CUDA device, in the checkpoint's own dtype."""

    name: ClassVar[str] = "cuda"
    memory_share: ClassVar[float] = 0.9
    measure_s: ClassVar[float] = 10.0
    records: ClassVar[bool] = True

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

    def multiplies(self, dtype: torch.dtype) -> bool:
        return super().multiplies(dtype) or torch.cuda.get_device_capability() >= (8, 9)

    @classmethod
    def pin(cls, address: int, num_bytes: int) -> bool:
        with suppress(Exception):  # raised if the runtime cannot be called
            if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) == 0:
                return True
        with suppress(Exception):  # the driver reports the error to the next kernel, so launch one
            torch.zeros(1, device=torch.device("cuda"))
        return False

    @classmethod
    def unpin(cls, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    @classmethod
    def record(cls, work: Callable[[], object]) -> Callable[[], object]:
        current, aside = torch.cuda.current_stream(), _aside(torch.cuda.current_device())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(current):  # torch.cuda.graph leaves its own one current where it fails
            aside.wait_stream(current)
            try:
                with torch.cuda.stream(aside):
                    work()  # libraries set themselves up when they are first called, which no graph may hold
            finally:
                current.wait_stream(aside)  # also where it fails: what is queued there still reads
            # One after another is launched, so all that live work in one memory, which ends with the last of them and
            # is refused from then on. Another thread's calls end no recording.
            memory = next((other.pool() for other in _graphs), None)
            with torch.cuda.graph(graph, pool=memory, stream=aside, capture_error_mode="thread_local"):
                work()
        _graphs.add(graph)
        return graph.replay

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        return allocator_peak_bytes(torch.cuda, work)


_graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
"""The recordings that live."""


@cache
def _aside(_: int) -> torch.cuda.Stream:
    """The stream of a device where all is recorded: memory is one stream's, and cuBLAS keeps some for each."""
    return torch.cuda.Stream()
