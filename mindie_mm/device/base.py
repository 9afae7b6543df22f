"""The interface of devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from mindie_mm.device.finding import Finding
from mindie_mm.device.kernels import Kernels
from mindie_mm.device.quantized_linear import QuantizedLinear, QuantizedWeight
from mindie_mm.errors import DeviceError
from mindie_mm.settings.cgroup import available_cpus
from mindie_mm.settings.environment import has_thread_count


class Device(ABC):
    """One device. A subclass is a kind of device."""

    name: ClassVar[str]
    """Value of --device."""
    memory_share: ClassVar[float]
    """Default fraction of `free_bytes` that an engine uses in addition to the weights."""
    kv_block_size: ClassVar[int] = 16
    """Default number of tokens in a KV block."""
    cheap_rows: ClassVar[int] = 64
    """Maximum number of tokens for which a step takes little longer than for one token, because reading the weights
    takes most of its time."""
    survives_fork: ClassVar[bool] = False
    """True if an engine may run in a forked process."""
    is_asynchronous: ClassVar[bool] = False
    """True if operators are queued, so that the host continues while the device computes."""
    records: ClassVar[bool] = False
    """True if `record` is supported."""
    keeps_float8: ClassVar[bool] = False
    """True if `quantized_linear` also takes weights in FP8. Otherwise, they are dequantized when they are loaded."""
    kernels: ClassVar[Kernels] = Kernels()
    """Fused operators of the device."""
    computes_peaks: ClassVar[bool] = False
    """True if `peak_bytes` computes a bound from shapes, instead of measuring. Other programs do not affect it."""
    scratch_bytes: ClassVar[int] = 0
    """Memory that `peak_bytes` does not include, because operators allocate it outside of tensors."""

    def __init__(self, index: int | None = None) -> None:
        self.index = index
        """Number of the device among the visible devices of its kind. None means the current device."""

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return the number of visible devices of this kind. Call this only if `missing` returns None."""

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Return the reason why the device cannot be used on this machine, or None if it can be used."""

    @classmethod
    def may_exist(cls) -> bool:
        """Return whether `missing` may return None. Unlike `missing`, do not load the device's runtime."""
        return True

    @classmethod
    def reported_free_bytes(cls) -> list[int]:
        """Return the free memory of each visible device in bytes, as the driver's own program reports it.

        Unlike `free_bytes`, do not load the device's runtime. Return an empty list if no device answers.
        """
        return []

    @classmethod
    def findings(cls, root: Path) -> Iterator[Finding]:
        """Report whether this machine can run the device. System files are read below `root`.

        Yield nothing if the device is absent.
        """
        yield from ()

    def operators(self) -> Iterator[Finding]:
        """Try the device's fused operators, and report their difference from plain PyTorch and their time."""
        yield from ()

    def decode_steps(self) -> Iterator[Finding]:
        """Report which code runs decode steps, if the device has several."""
        yield from ()

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The torch.device on which tensors are allocated."""

    def use(self) -> None:
        """Make the device the current device, on which this thread creates streams and graphs."""
        if self.index is not None:
            torch.accelerator.set_device_index(self.index)

    def bind_engine(self) -> None:
        """Bind this process and the threads of the device's runtime to CPUs near the device, if this is of use."""

    @classmethod
    def bind_tokenizer(cls) -> None:
        """Bind this thread and its later children to CPUs near the visible devices, if this is of use."""

    @property
    def fuses_layers(self) -> bool:
        """True if `nn/decoder_layer.py` replaces transformers' layers on this device."""
        return False

    @abstractmethod
    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that "auto" selects for a checkpoint stored as `checkpoint_dtype`."""

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Return whether the device has instructions for products in `dtype`.

        Without such instructions, products are several times slower than in float32, and products
        of an 8-bit dtype fail.
        """
        return dtype != torch.float8_e4m3fn

    @classmethod
    def tower_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which towers of a model of `dtype` compute unless a setting determines it.

        The dtype is at least as precise as `dtype`.
        """
        return dtype

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the amount of memory that a model and its KV cache may still use, in bytes."""

    @abstractmethod
    def peak_bytes(self, work: Callable[[], object], scale: float = 1.0) -> Callable[[], int]:
        """Return a function that returns the peak memory in bytes that `work` adds.

        A device that `computes_peaks` multiplies the size of each tensor by `scale`, which is 1 for other devices. It
        may compute several peaks side by side, until the function is called. Other devices run `work` at once.
        """

    def grown_bytes(self, work: Callable[[], object]) -> int:
        """Run `work`, and return the growth of this process's memory in bytes. Requires `computes_peaks`."""
        raise NotImplementedError

    @classmethod
    def pin(cls, address: int, num_bytes: int) -> bool:
        """Register host memory with the driver for DMA. Return False if the driver cannot register it.

        This method never raises, because an unregistered buffer can be copied in another way.
        """
        return False

    @classmethod
    def read(cls, source: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
        """Queue a copy to the device of `stream`, and return the copy. `pin` has registered the memory of `source`."""
        with stream:
            return source.to(stream.device, non_blocking=True)

    @classmethod
    def unpin(cls, address: int) -> None:
        """Unregister the memory that `pin` registered at `address`."""

    @classmethod
    def why_not_record(cls) -> str | None:
        """Return the reason why the environment does not allow `record`, with advice, or None if it allows it."""
        return None

    @classmethod
    def record(cls, work: Callable[[], object]) -> Callable[[Sequence[int]], object]:
        """Record the kernels that `work` launches. Return a function that launches all of them on the same memory.

        The argument of the function is the length of each sequence, including its new token. It replaces the lengths
        in `Rows` that `work` gave to fused attention, which may take lengths from the host. This method requires
        `records`. `work` runs once before the recording, and its kernels may or may not run during the recording.

        Raises:
            RuntimeError: `work` waits for the device, or there is not enough memory.

        """
        raise NotImplementedError

    def int8_linear(self, linear: torch.nn.Linear) -> torch.nn.Module:
        """Return a layer with int8 weights that computes nearly the same as `linear`.

        Raises:
            DeviceError: The device has no such layer.

        """
        raise DeviceError(f"weights=int8 is not supported on the device {self.name}; leave the setting out")

    def quantized_linear(self, weight: QuantizedWeight, bias: torch.nn.Parameter | None) -> torch.nn.Module:
        """Return a layer on this device for a weight that a checkpoint stores as integers, or in FP8.

        Args:
            weight: The weight, on any device.
            bias: The bias, on this device.

        """
        return QuantizedLinear(weight.packed().to(self.torch_device), bias)

    def prepare(self, module: torch.nn.Module) -> None:
        """Convert the weights of a loaded and placed model to the fastest layout."""


def default_num_threads() -> int:
    """Return the default number of host threads for computing.

    OMP_NUM_THREADS or MKL_NUM_THREADS sets this number. Without these variables, it is the number of CPUs that the
    affinity mask and the cgroup allow.
    """
    return torch.get_num_threads() if has_thread_count() else available_cpus()


def allocator_peak_bytes(runtime: Any, index: int | None, work: Callable[[], object]) -> Callable[[], int]:
    """Implement `Device.peak_bytes` with the caching allocator of `runtime`, a module such as torch.cuda."""
    runtime.synchronize(index)
    runtime.empty_cache()
    runtime.reset_peak_memory_stats(index)
    before = runtime.memory_reserved(index)
    work()
    runtime.synchronize(index)
    taken = int(runtime.max_memory_reserved(index)) - int(before)
    runtime.empty_cache()
    return lambda: taken
