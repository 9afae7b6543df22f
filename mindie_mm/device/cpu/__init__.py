"""The CPU, which is always available."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist

from mindie_mm.device import host_memory
from mindie_mm.device.base import Device
from mindie_mm.device.choices import choose
from mindie_mm.device.cpu import cpu_attention
from mindie_mm.device.cpu.cpu_kernels import CPUKernels
from mindie_mm.device.cpu.cpu_layers import lighten
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear
from mindie_mm.device.cpu.decode_step import GROUP, MOST_ROWS, NIBBLES, NotCompiled, StepLinear, instructions
from mindie_mm.device.cpu.onednn_linear import use_onednn
from mindie_mm.device.cpu.step_memory import allocated_peak_bytes, computed_peak_bytes
from mindie_mm.device.cpu.weight_pages import drop_unused_pages
from mindie_mm.device.cpu.wide_linear import pays, use_float32
from mindie_mm.device.finding import Finding
from mindie_mm.device.kernels import Kernels
from mindie_mm.device.quantized_linear import QuantizedWeight

_log = logging.getLogger(__name__)


class CPU(Device):
    """The host's processor. Its default dtype is float32."""

    name: ClassVar[str] = "cpu"
    survives_fork: ClassVar[bool] = True
    keeps_float8: ClassVar[bool] = True
    kernels: ClassVar[Kernels] = CPUKernels()
    cheap_rows: ClassVar[int] = GROUP
    memory_share: ClassVar[float] = 0.5  # other processes and shared memory need the same memory
    computes_peaks: ClassVar[bool] = True
    scratch_bytes: ClassVar[int] = 32 * 2**20

    @classmethod
    def count(cls) -> int:
        return 1

    @classmethod
    def missing(cls) -> str | None:
        return None

    @classmethod
    def reported_free_bytes(cls) -> list[int]:
        return [host_memory.available_bytes()]

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def fuses_layers(self) -> bool:
        return choose("fused", lambda: True)

    def decode_steps(self) -> Iterator[Finding]:
        try:
            found = f"compiled code ({instructions()}) runs steps of up to {MOST_ROWS} tokens of Llama-like models"
        except NotCompiled as reason:
            yield Finding("decode steps", "warning", "torch runs all decode steps", str(reason))
        else:
            yield Finding("decode steps", "ok", found, "the log says whether it runs the checkpoint, or why not")

    def use(self) -> None:
        pass  # there is only one

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        # Decode steps in bfloat16 read half as many bytes. They were not measured on aarch64.
        keeps = (
            checkpoint_dtype == torch.bfloat16 and platform.machine() == "x86_64" and self.multiplies(torch.bfloat16)
        )
        return torch.bfloat16 if keeps else torch.float32

    def multiplies(self, dtype: torch.dtype) -> bool:
        if dtype not in (torch.bfloat16, torch.float16):
            return super().multiplies(dtype)
        return choose("bfloat16", lambda: _has_instructions(dtype))

    @classmethod
    def tower_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype == torch.bfloat16 and choose("wide", pays) else dtype

    def int8_linear(self, linear: torch.nn.Linear) -> torch.nn.Module:
        return CPUQuantizedLinear.of(linear)

    def quantized_linear(self, weight: QuantizedWeight, bias: torch.nn.Parameter | None) -> torch.nn.Module:
        return CPUQuantizedLinear(weight.packed() if weight.shape[1] % NIBBLES == 0 else weight, bias)

    def prepare(self, module: torch.nn.Module) -> None:
        host_memory.keep_freed()
        use_onednn(module)
        use_float32(module)
        _compile_quantized(module)
        lighten(module)
        cpu_attention.replace(module)
        drop_unused_pages(module)

    def free_bytes(self) -> int:
        return host_memory.available_bytes()

    def peak_bytes(self, work: Callable[[], object], scale: float = 1.0) -> Callable[[], int]:
        if dist.is_initialized():  # the ranks' collective operations need real tensors
            return partial(_allocated, work, scale)
        computed = computed_peak_bytes(work, scale)

        def peak() -> int:
            try:
                return computed()
            except RuntimeError as error:  # the family may be from another package, and shapes may depend on values
                _log.warning("the memory of a step cannot be computed from shapes (%s); the step is run instead", error)
                return _allocated(work, scale)

        return peak

    def grown_bytes(self, work: Callable[[], object]) -> int:
        return host_memory.grown_bytes(work)


def _allocated(work: Callable[[], object], scale: float) -> int:
    return math.ceil(allocated_peak_bytes(work) * scale)


def _compile_quantized(module: torch.nn.Module) -> None:
    """Let compiled code run quantized layers for few rows, even if torch runs the other layers of the step."""
    for part in module.modules():
        if isinstance(part, CPUQuantizedLinear):
            with suppress(NotCompiled):
                part.few = StepLinear(part)


def _has_instructions(dtype: torch.dtype) -> bool:
    """Return whether the processor has instructions for products in bfloat16 or float16."""
    if not torch.backends.mkldnn.is_available():
        return False
    on_x86 = platform.machine() == "x86_64"
    if dtype == torch.float16:
        return not on_x86 or torch.ops.mkldnn._is_mkldnn_fp16_supported()  # noqa: SLF001 - there is no public name
    # oneDNN accepts bfloat16 on any AVX-512 processor, but may multiply in float32.
    has = not on_x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return has and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
