"""NVIDIA GPUs, used through the CUDA build of PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from mindie_mm.device import joined_experts, programs
from mindie_mm.device.base import Device, allocator_peak_bytes
from mindie_mm.device.joined_experts import ExpertWeights
from mindie_mm.device.kernels import Kernels
from mindie_mm.settings.config import MiB
from mindie_mm.settings.environment import foreign

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvmap")
"""Device files of the driver on servers, on Windows' subsystem for Linux and on Jetson modules."""


_GROUPED_STEP = 8
"""The widths of grouped products must be multiples of this number, because rows must be aligned to 16 bytes."""


class CUDAKernels(Kernels):
    """The fused operators of a GPU."""

    def experts(self, hidden: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        first, second = experts.first, experts.second
        widths = *first.shape[1:], *second.shape[1:]
        if hidden.dtype != torch.bfloat16 or any(width % _GROUPED_STEP for width in widths) or not _groups(hidden):
            return super().experts(hidden, chosen, weights, experts)
        order, counts = joined_experts.sort_rows(chosen, len(first))
        stops = counts[:-1].cumsum(0, dtype=torch.int32)  # rows after the last are not computed
        inner = experts.activate(grouped_mm(hidden[order // chosen.shape[1]], first.transpose(1, 2), offs=stops))
        passed = joined_experts.unsort_rows(grouped_mm(inner, second.transpose(1, 2), offs=stops), order, chosen)
        if experts.is_share:
            passed = joined_experts.without_others(passed, chosen, len(first))
        return joined_experts.weighted_sum(passed, weights)


def _groups(hidden: Tensor) -> bool:
    """Return whether PyTorch has a kernel for `grouped_mm` on this GPU. Otherwise, `grouped_mm` waits for the GPU."""
    return torch.cuda.get_device_capability(hidden.device) >= (8, 0)


class CUDA(Device):
    """A CUDA device. The default dtype is the dtype of the checkpoint."""

    name: ClassVar[str] = "cuda"
    kernels: ClassVar[Kernels] = CUDAKernels()
    memory_share: ClassVar[float] = 0.9
    is_asynchronous: ClassVar[bool] = True
    records: ClassVar[bool] = True

    @classmethod
    def count(cls) -> int:
        return torch.cuda.device_count()

    @classmethod
    def missing(cls) -> str | None:
        if torch.version.cuda is None:
            return (
                f"this build of torch ({torch.__version__}) has no CUDA support; pytorch.org/get-started shows how to "
                "install one with CUDA support"
            )
        if torch.cuda.is_available():
            return None
        try:
            torch.cuda.init()  # the error gives the reason, such as an old or missing driver
        except RuntimeError as error:
            return f"{error}; check nvidia-smi. In a container, check that the GPUs were passed to it (--gpus all)"
        return "no CUDA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"

    @classmethod
    def may_exist(cls) -> bool:
        # `doctor` has stand-ins for torch, so that only the version says whether this is a build for CPUs.
        is_built = "+cpu" not in version("torch") and torch.version.cuda is not None
        return is_built and any(map(os.path.exists, _DRIVERS))

    @classmethod
    def reported_free_bytes(cls) -> list[int]:
        lines = programs.output_of("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits").split()
        if (visible := foreign([_VISIBLE]).get(_VISIBLE)) is None:
            selected: list[str] = lines
        else:
            selected = [lines[int(part)] for part in visible.split(",") if part.isdecimal() and int(part) < len(lines)]
        return [int(line) * MiB for line in selected if line.isdecimal()]  # [N/A] if the memory is the host's

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device() if self.index is None else self.index)

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return checkpoint_dtype

    def multiplies(self, dtype: torch.dtype) -> bool:
        return super().multiplies(dtype) or torch.cuda.get_device_capability(self.index) >= (8, 9)

    @classmethod
    def pin(cls, address: int, num_bytes: int) -> bool:
        with suppress(Exception):  # the runtime may not be callable
            if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) == 0:
                return True
        with suppress(Exception):  # the next kernel reports the driver's error, so launch one here
            torch.zeros(1, device=torch.device("cuda"))
        return False

    @classmethod
    def unpin(cls, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    @classmethod
    def record(cls, work: Callable[[], object]) -> Callable[[Sequence[int]], object]:
        current, aside = torch.cuda.current_stream(), _aside(torch.cuda.current_device())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(current):  # torch.cuda.graph does not restore the current stream if it fails
            aside.wait_stream(current)
            try:
                with torch.cuda.stream(aside):
                    work()  # libraries initialize themselves at their first call, which a graph must not record
            finally:
                current.wait_stream(aside)  # even after a failure, because queued work still reads its inputs
            # Graphs are launched one after another, so all live graphs share one memory pool. The pool is freed with
            # the last live graph and must not be used afterwards. In thread_local mode, calls from other threads do not
            # abort the capture.
            memory = next((other.pool() for other in _graphs), None)
            with torch.cuda.graph(graph, pool=memory, stream=aside, capture_error_mode="thread_local"):
                work()
        _graphs.add(graph)
        return lambda lengths: graph.replay()  # no kernel of a GPU takes lengths from the host

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.index)[0]

    def peak_bytes(self, work: Callable[[], object], scale: float = 1.0) -> Callable[[], int]:
        return allocator_peak_bytes(torch.cuda, self.index, work)


_graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
"""The recorded graphs that are still referenced."""


@cache
def _aside(_: int) -> torch.cuda.Stream:
    """Return the stream on which all graphs of a device are recorded.

    All graphs use one stream, because memory belongs to a stream and cuBLAS keeps a workspace for each stream.
    """
    return torch.cuda.Stream()
