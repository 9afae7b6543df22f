"""Linear layers whose weights lie as oneDNN multiplies with them fastest.

torch multiplies float32 on the CPU by MKL, which takes a slower path on processors that are not Intel's. Weights that
were laid out for oneDNN once are up to 2.2 times as fast there, and on Intel's own as fast, less what the call costs:
which it is here is tried (docs/decisions/0020-cpu-speed.md).
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

_LEAST_ELEMENTS = 2**17
"""A weight of fewer elements is not packed: the call costs more than it saves where few rows go in, as in decoding."""

_TRIALS = ((1536, 16, 1.1), (8, 256, 1.0))
"""Rows of a product (a small tower's, and a decode step's), turns, and how much faster it must be. Intel's processors
were seen at 1.0 and less than that, AMD's at 1.15 and 1.3 or more."""
_WIDTH, _OUTPUTS = 256, 1024


class PackedLinear(nn.Module):
    """As the nn.Linear that it is made from, for inference alone. Its weight can be multiplied with, not read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())  # noqa: SLF001 - it has no other name
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] -> [..., outputs], of the weight's dtype."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")  # noqa: SLF001
        return out


@cache
def pays(dtype: torch.dtype) -> bool:
    """Whether packed weights are clearly faster on this processor: a trial of some 100 ms."""
    if not (multiplies_bfloat16() if dtype == torch.bfloat16 else dtype == torch.float32 and _has_onednn()):
        return False
    plain = nn.Linear(_WIDTH, _OUTPUTS, dtype=dtype)
    packed = PackedLinear(plain)
    return all(
        _ratio(plain, packed, torch.zeros(num_rows, _WIDTH, dtype=dtype), turns) > worth
        for num_rows, turns, worth in _TRIALS
    )


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has instructions of the processor for it."""
    return _has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and platform.machine() == "x86_64"  # on others it was never run


def pack(module: nn.Module, pays: Callable[[torch.dtype], bool] = pays) -> None:
    """Replaces the linear layers in `module` that are on the host and gain by it, each judged by `pays`.

    Those that share their weight stay: it would be there twice. So do subclasses, which know more of their weight,
    and those with hooks (nn/placement.py) or a forward of their own (tensor parallel), which a replacement would not
    have.
    """
    holders = Counter(id(weight) for one in module.modules() for weight in one.parameters(recurse=False))
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            own = child._forward_pre_hooks or "forward" in vars(child)  # noqa: SLF001
            if type(child) is not nn.Linear or holders[id(child.weight)] > 1 or own:
                continue
            weight = child.weight
            if weight.device.type == "cpu" and weight.numel() >= _LEAST_ELEMENTS and pays(weight.dtype):
                setattr(parent, name, PackedLinear(child))


def _ratio(plain: nn.Module, packed: nn.Module, rows: Tensor, turns: int) -> float:
    """How many times as fast `packed` is."""
    # In turns, and the shortest of each: what else the processor does only makes it longer.
    times = [(_seconds(plain, rows), _seconds(packed, rows)) for _ in range(turns)]
    return min(took for took, _ in times) / min(took for _, took in times)


def _seconds(layer: nn.Module, rows: Tensor) -> float:
    with torch.inference_mode():
        began = time.perf_counter()
        layer(rows)
        return time.perf_counter() - began
