"""Linear layers with weights in the layout that oneDNN multiplies fastest.

PyTorch multiplies float32 on the CPU with MKL, which uses a slower path on processors from makers other than Intel.
There, weights packed for oneDNN are up to 2.2 times as fast. On Intel processors, packing only adds the overhead of the
call. A trial decides whether weights are packed (docs/decisions/0020-cpu-speed.md).
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from functools import cache, partial

import torch
from torch import Tensor, nn

from mindie_mm.device.choices import choose
from mindie_mm.device.cpu.decode_step import KEEPS_LAYOUT

_LEAST_ELEMENTS = 2**17
"""Minimum number of elements of a packed weight. For smaller weights, a call with few rows has too much overhead."""

_TRIALS = ((1536, 16, 1.1), (8, 256, 1.0))
"""Number of rows, number of repetitions, and minimum speedup of each trial.

The first trial has as many rows as a small tower, and the second as many as a decode step. Intel processors reached
speedups of 1.0 in the first trial and less in the second. AMD processors reached 1.15 and at least 1.3.
"""
_WIDTH, _OUTPUTS = 256, 1024


class PackedLinear(nn.Module):
    """An nn.Linear with a packed weight, for inference only. The weight can be multiplied but not read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())  # noqa: SLF001 - there is no public name
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., width] to [..., outputs]. The dtype must be the dtype of the weight."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")  # noqa: SLF001
        return out


@cache
def pays(dtype: torch.dtype) -> bool:
    """Return whether packed weights are clearly faster on this processor. The trial takes about 100 ms."""
    plain = nn.Linear(_WIDTH, _OUTPUTS, dtype=dtype)
    packed = PackedLinear(plain)
    return all(
        _ratio(plain, packed, torch.zeros(num_rows, _WIDTH, dtype=dtype), turns) > worth
        for num_rows, turns, worth in _TRIALS
    )


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN can use bfloat16 instructions of this processor."""
    return _has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and platform.machine() == "x86_64"  # not tested on other architectures


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can multiply packed weights of this dtype on this processor."""
    return multiplies_bfloat16() if dtype == torch.bfloat16 else dtype == torch.float32 and _has_onednn()


def pack(module: nn.Module) -> None:
    """Replace the linear layers of `module` on the CPU by packed layers if these are faster.

    Layers with a shared weight are kept, because the weight would be in memory twice. Subclasses of nn.Linear are kept,
    because they may use their weight in other ways. Layers with hooks (nn/placement.py) or a replaced `forward` (tensor
    parallelism) are kept, because the packed layer would lose the hooks or the replacement. Compiled decode steps read
    the weights of layers with `KEEPS_LAYOUT`.
    """
    holders = Counter(id(weight) for one in module.modules() for weight in one.parameters(recurse=False))
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            own = child._forward_pre_hooks or {"forward", KEEPS_LAYOUT} & vars(child).keys()  # noqa: SLF001
            if type(child) is not nn.Linear or holders[id(child.weight)] > 1 or own:
                continue
            weight = child.weight
            if weight.device.type == "cpu" and weight.numel() >= _LEAST_ELEMENTS and _is_packed(weight.dtype):
                setattr(parent, name, PackedLinear(child))


def _is_packed(dtype: torch.dtype) -> bool:
    return can_pack(dtype) and choose("packed", partial(pays, dtype))


def _ratio(plain: nn.Module, packed: nn.Module, rows: Tensor, turns: int) -> float:
    # Alternate between the layers and take the minimum of each, because other load only adds time.
    times = [(seconds(plain, rows), seconds(packed, rows)) for _ in range(turns)]
    return min(took for took, _ in times) / min(took for _, took in times)


def seconds(layer: nn.Module, rows: Tensor) -> float:
    """Return the time of one call of `layer`."""
    with torch.inference_mode():
        began = time.perf_counter()
        layer(rows)
        return time.perf_counter() - began
