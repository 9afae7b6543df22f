"""Linear layers that oneDNN multiplies instead of MKL.

PyTorch multiplies float32 on the CPU with MKL, which uses a slower path on processors from makers other than Intel:
there, oneDNN is up to 1.7 times as fast (docs/decisions/0020-cpu-speed.md). oneDNN reads the weight in torch's layout,
so the weight is in memory once. PyTorch itself multiplies bfloat16 with oneDNN.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from mindie_mm.device.choices import choose
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear

_LEAST_ELEMENTS = 2**17
"""Minimum number of elements of a weight. For smaller weights, the call has too much overhead."""
_CPUINFO = Path("/proc/cpuinfo")


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of float32 `rows`, [..., width], and `weight`, [outputs, width], plus `bias`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")  # noqa: SLF001 - no public name
    return out


class OneDNNLinear(nn.Module):
    """An nn.Linear for inference in float32. It has the same weight and bias as the original layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape  # some of transformers' modules read them
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., width] to [..., outputs]."""
        return multiply(rows, self.weight, self.bias)


def use_onednn(module: nn.Module) -> None:
    """Let oneDNN multiply in the linear layers of `module` in float32 if it is faster than MKL on this processor."""
    if not has_onednn() or not choose("onednn", is_faster):
        return
    for part in module.modules():
        if isinstance(part, CPUQuantizedLinear):
            part.multiply = multiply
    for parent, name, child in plain_linears(module):
        if child.weight.dtype == torch.float32 and child.weight.numel() >= _LEAST_ELEMENTS:
            setattr(parent, name, OneDNNLinear(child))


def plain_linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers of `module` on the CPU that can be replaced: parent, name, and layer.

    Subclasses of nn.Linear are left out, because they may use their weight in other ways. Layers with hooks
    (nn/placement.py) or a replaced `forward` (tensor parallelism) are left out, because the new layer would lose the
    hooks or the replacement.
    """
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if type(child) is not nn.Linear or child._forward_pre_hooks or "forward" in vars(child):  # noqa: SLF001
                continue
            if child.weight.device.type == "cpu":
                yield parent, name, child


def has_onednn() -> bool:
    """Return whether torch contains oneDNN, on an architecture on which these layers were tested."""
    return torch.backends.mkldnn.is_available() and platform.machine() == "x86_64"


@cache
def is_faster() -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL on this processor, which depends on its maker."""
    try:
        return "GenuineIntel" not in _CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return False


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN can use bfloat16 instructions of this processor."""
    return has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
