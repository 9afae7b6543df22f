"""Ascend NPUs, used through torch_npu.

Fused operators are in `npu_kernels.py` and `npu_layers.py`. docs/npu.md explains the design.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from mindie_mm.device.base import Device, allocator_peak_bytes
from mindie_mm.device.finding import Finding
from mindie_mm.device.kernels import Kernels
from mindie_mm.device.npu import cpu_binding, npu_graphs, npu_kernels, npu_layers
from mindie_mm.device.npu import doctor as npu_doctor
from mindie_mm.device.npu.npu_kernels import NPUKernels
from mindie_mm.device.npu.npu_quantized import NPUQuantizedLinear
from mindie_mm.device.quantized_linear import QuantizedWeight
from mindie_mm.errors import DeviceError
from mindie_mm.settings.environment import expand_segments

_log = logging.getLogger(__name__)

_HOST_TO_DEVICE = 1
_REGISTER = (0x1000_0000 | 0x2, 0x2)
"""Flags to try in order: ACL_HOST_REG_PINNED with ACL_HOST_REG_MAPPED, then ACL_HOST_REG_MAPPED alone.

Both include ACL_HOST_REG_MAPPED, without which the device reads host memory more slowly (docs/npu.md).
"""
_KERNEL_THAT_FAILS = (5, 10)
"""Last Linux version on which registration may fail.

CANN documents that aclrtHostRegisterV2 leads to exceptions up to this version for memory not allocated by CANN.
"""
_WITHOUT_OPERATORS = "Ascend310P"
"""Prefix of the names of chips whose CANN lacks operators that an engine needs.

CANN's product tables do not list them for aclnnFusedInferAttentionScoreV3, aclnnFlashAttentionVarLenScore,
aclnnScatterPaKvCache and aclnnInplaceIndexCopy. The operators that replace them store the KV cache in another format.
"""
_LACKING = "npu_fused_infer_attention_score, npu_fusion_attention, npu_scatter_pa_kv_cache and index_copy_"


class NPU(Device):
    """An NPU of Atlas A2 or A3. The default dtype is the dtype of the checkpoint."""

    name: ClassVar[str] = "npu"
    memory_share: ClassVar[float] = 0.9
    kv_block_size: ClassVar[int] = 128  # the minimum for fused attention
    is_asynchronous: ClassVar[bool] = True
    records: ClassVar[bool] = True
    kernels: ClassVar[Kernels] = NPUKernels()

    @classmethod
    def count(cls) -> int:
        return int(_npu().device_count())

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            release = torch.__version__.partition("+")[0]
            return f"torch_npu is not installed: install CANN, then pip install torch_npu=={release}"
        expand_segments("PYTORCH_NPU_ALLOC_CONF")  # torch_npu reads the variable when it is imported
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # noqa: BLE001 - beside another release of torch it fails to patch torch, in various ways
            return f"torch_npu cannot be imported ({error}); source CANN's set_env.sh first"
        if not _npu().is_available():
            return "no NPU is visible; check npu-smi info"
        name = (_acl().aclrtGetSocName() or b"").decode()
        if not name.startswith(_WITHOUT_OPERATORS):
            return None
        return f"the NPU is an {name}, whose CANN lacks {_LACKING}; use an Atlas A2 or A3, or --device cpu"

    @classmethod
    def may_exist(cls) -> bool:
        return importlib.util.find_spec("torch_npu") is not None

    @classmethod
    def reported_free_bytes(cls) -> list[int]:
        return npu_doctor.free_bytes()

    @classmethod
    def findings(cls, root: Path) -> Iterator[Finding]:
        return npu_doctor.findings(root)

    def operators(self) -> Iterator[Finding]:
        return npu_kernels.findings(self.torch_device)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("npu", _npu().current_device() if self.index is None else self.index)

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return checkpoint_dtype

    @classmethod
    def pin(cls, address: int, num_bytes: int) -> bool:
        runtime = getattr(_npu(), "npurt", None)  # torch_npu before 2.12.0.post3 lacks this attribute
        if runtime is None or not registers(platform.release()):
            return False
        try:
            return any(runtime().npuHostRegister(address, num_bytes, flags) == 0 for flags in _REGISTER)
        except Exception as error:  # noqa: BLE001 - torch_npu raises various errors if CANN lacks the function
            _log.warning(
                "CANN cannot register host memory, so media are copied once more on the way to the device: %s",
                str(error).partition("\n")[0],
            )
            return False

    @classmethod
    def read(cls, source: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
        # Call CANN directly, because torch_npu waits for copies from memory that its own allocator has not pinned.
        with stream:
            target = torch.empty_like(source, device=stream.device)
        size = source.nbytes
        arguments = target.data_ptr(), size, source.data_ptr(), size, _HOST_TO_DEVICE, _handle(stream)
        if code := _acl().aclrtMemcpyAsync(*arguments):
            raise DeviceError(f"aclrtMemcpyAsync of {size} bytes to {stream.device} failed with CANN error {code}")
        return target

    @classmethod
    def unpin(cls, address: int) -> None:
        _npu().npurt().npuHostUnregister(address)

    def bind_engine(self) -> None:
        torch.zeros(1, device=self.torch_device)  # starts torch_npu's threads
        cpu_binding.bind_engine(self.torch_device.index)

    @classmethod
    def bind_tokenizer(cls) -> None:
        cpu_binding.bind_tokenizer()

    @classmethod
    def why_not_record(cls) -> str | None:
        return npu_graphs.why_not_record()

    @classmethod
    def record(cls, work: Callable[[], object]) -> Callable[[Sequence[int]], object]:
        return npu_graphs.record(work)

    def quantized_linear(self, weight: QuantizedWeight, bias: torch.nn.Parameter | None) -> torch.nn.Module:
        return NPUQuantizedLinear(weight.to(self.torch_device), bias)  # its operators read int8

    def prepare(self, module: torch.nn.Module) -> None:
        npu_layers.fuse(module)

    @property
    def fuses_layers(self) -> bool:
        return True

    def free_bytes(self) -> int:
        torch.zeros(1, device=self.torch_device)  # initialize the NPU, because CANN requires this for the query
        return int(_npu().mem_get_info(self.index)[0])

    def peak_bytes(self, work: Callable[[], object], scale: float = 1.0) -> Callable[[], int]:
        return allocator_peak_bytes(_npu(), self.index, work)


def registers(kernel: str) -> bool:
    """Return whether CANN can register shared memory on a Linux kernel of this release, such as 5.10.0-136.oe2203."""
    match = re.match(r"(\d+)\.(\d+)", kernel)
    return match is not None and (int(match[1]), int(match[2])) > _KERNEL_THAT_FAILS


@cache
def _handle(stream: torch.Stream) -> int:
    """Return CANN's handle of a stream. It is read once, because each read waits for torch_npu's task queue."""
    names = ("stream_id", "device_index", "device_type")
    # torch.Stream.native_handle is the same number, but needs torch_npu 2.13.
    handle: int = _npu().Stream(**{name: getattr(stream, name) for name in names}).npu_stream
    return handle


@cache
def _acl() -> ctypes.CDLL:
    """Return CANN's runtime library, which torch_npu has loaded."""
    library = ctypes.CDLL("libascendcl.so")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.aclrtGetSocName.restype = ctypes.c_char_p
    library.aclrtMemcpyAsync.argtypes = [pointer, size, pointer, size, ctypes.c_int, pointer]
    return library


def _npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
