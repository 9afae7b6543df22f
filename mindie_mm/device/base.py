"""What the rest of the package may ask of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from mindie_mm.cgroup import available_cpus
from mindie_mm.device.finding import Finding
from mindie_mm.device.kernels import Kernels
from mindie_mm.environment import has_thread_count


class Device(ABC):
    """One kind of device."""

    name: ClassVar[str]
    """What --device takes."""
    memory_share: ClassVar[float]
    """Share of `free_bytes` that an engine takes beside the weights, unless it is told otherwise."""
    kv_block_size: ClassVar[int] = 16
    """Tokens in a block of the KV cache, unless an engine is told otherwise."""
    records: ClassVar[bool] = False
    """Whether work can be recorded and launched again as one."""
    kernels: ClassVar[Kernels] = Kernels()
    """Its fused operators."""
    measure_s: ClassVar[float]
    """About how long an engine may try, at its start, what its work takes, unless it is told otherwise."""

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why it can't be used here, in words for an operator; None if it can."""

    @classmethod
    def findings(cls, root: Path) -> Iterator[Finding]:
        """What of the machine, its files below `root`, serves this kind, and what not; nothing where it is absent."""
        yield from ()

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where tensors go."""

    @abstractmethod
    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """The dtype that `auto` means for a checkpoint stored as `checkpoint_dtype`."""

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether it has instructions for products in `dtype`; else it takes several times as long as in float32."""
        return True

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that a model and its cache may still take."""

    @abstractmethod
    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Does `work` and returns the most memory that it took at a time, beside what was taken before."""

    @classmethod
    def pin(cls, address: int, num_bytes: int) -> bool:
        """Register memory of the host with the driver, which then reads it by itself; False where it does not.

        Raises nothing: without it the same bytes go another way.
        """
        return False

    @classmethod
    def read(cls, source: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
        """A copy on the device of `stream`, queued there, of a tensor in memory that `pin` registered."""
        with stream:
            return source.to(stream.device, non_blocking=True)

    @classmethod
    def unpin(cls, address: int) -> None:
        """Takes back what `pin` did at `address`."""

    @classmethod
    def record(cls, work: Callable[[], object]) -> Callable[[], object]:
        """Records what `work` launches: what is returned launches all of that at once, on the same memory.

        `work` may be done meanwhile, or not. Only where `records`. RuntimeError where `work` waits for the device,
        which no recording holds, or memory lacks.
        """
        raise NotImplementedError

    def prepare(self, module: torch.nn.Module) -> None:
        """Lays out the weights of a model that is loaded and placed as they are computed with fastest."""


def default_num_threads() -> int:
    """Return the number of threads to compute with on the host, unless a setting gives it.

    OMP_NUM_THREADS and MKL_NUM_THREADS come first, then the CPUs that affinity mask and control group leave.
    """
    return torch.get_num_threads() if has_thread_count() else available_cpus()


def allocator_peak_bytes(runtime: Any, work: Callable[[], object]) -> int:
    """`Device.peak_bytes` by the caching allocator of `runtime`, a module such as torch.cuda."""
    runtime.synchronize()
    runtime.empty_cache()
    runtime.reset_peak_memory_stats()
    before = runtime.memory_reserved()
    work()
    runtime.synchronize()
    taken = int(runtime.max_memory_reserved()) - int(before)
    runtime.empty_cache()
    return taken
