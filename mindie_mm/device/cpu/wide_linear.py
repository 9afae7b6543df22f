"""Linear layers in bfloat16 whose products are computed in float32.

Intel's processors without AMX multiply bfloat16 at half the rate of float32 (docs/lab-notes.md). It is faster there to
convert the weight to float32 first, in blocks that fit into the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mindie_mm.device.choices import choose
from mindie_mm.device.cpu.cpu_quantized import CONVERTED, CPUQuantizedLinear
from mindie_mm.device.cpu.onednn_linear import has_onednn, is_faster, plain_linears

_LEAST_ROWS = 32
"""Minimum number of rows. For fewer rows, converting the weight takes longer than the product saves."""


class WideLinear(nn.Module):
    """An nn.Linear for inference in bfloat16. It has the same weight and bias as the original layer."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = original.weight.shape  # some of transformers' modules read them
        self.weight = original.weight
        self.bias = original.bias

    def forward(self, rows: Tensor) -> Tensor:
        """Map bfloat16 or float32 [..., width] to [..., outputs] of the same dtype."""
        outputs, width = self.out_features, self.in_features
        if rows.dtype == torch.bfloat16 and rows.numel() < _LEAST_ROWS * width:
            return linear(rows, self.weight, self.bias)
        wide = rows.reshape(-1, width).float()
        out = wide.new_empty(len(wide), outputs)
        size = max(CONVERTED // width, 1)
        for weight, part in zip(self.weight.split(size), out.split(size, 1), strict=True):
            torch.mm(wide, weight.float().t(), out=part)
        if self.bias is not None:
            out += self.bias
        return out.to(rows.dtype).view(*rows.shape[:-1], outputs)


def use_float32(module: nn.Module) -> None:
    """Let the bfloat16 linear layers of `module` multiply in float32 if this is faster on this processor."""
    if not choose("wide", pays):
        return
    for part in module.modules():
        if isinstance(part, CPUQuantizedLinear):
            part.widens = True
    for parent, name, child in plain_linears(module):
        if child.weight.dtype == torch.bfloat16:
            setattr(parent, name, WideLinear(child))


def widens(linear: nn.Module) -> bool:
    """Return whether a linear layer also takes rows in float32 in a model of bfloat16."""
    return isinstance(linear, WideLinear) or (isinstance(linear, CPUQuantizedLinear) and linear.widens)


def pays() -> bool:
    """Return whether this processor multiplies float32 faster than bfloat16."""
    return has_onednn() and not is_faster() and not torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - no public name
