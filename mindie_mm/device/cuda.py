"""NVIDIA GPUs through torch's own build for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

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

    @classmethod
    def record(cls, work: Callable[[], object]) -> Callable[[], object]:
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            work()  # libraries set themselves up when they are first called, which no graph may hold
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # One after another is launched, so all may work in one memory. Another thread's calls end no recording.
        with torch.cuda.graph(graph, pool=_graph_memory(), capture_error_mode="thread_local"):
            work()
        return graph.replay

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        return allocator_peak_bytes(torch.cuda, work)


@cache
def _graph_memory() -> Any:
    return torch.cuda.graph_pool_handle()
