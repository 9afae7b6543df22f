"""Linear layers with quantized weights on the CPU.

`--weights int8` makes such layers from plain ones, and checkpoints publish quantized weights. Compiled code multiplies
few rows without converting the weight first.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mindie_mm.device.quantized_linear import QuantizedLinear, QuantizedWeight

_TRIED_WIDTH = 64
"""Number of inputs in the trial. It is longer than a register of any processor."""
CONVERTED = 2**20
"""Maximum number of values that are converted to the dtype of the activations at a time. They fit into the cache."""


class FewRows(Protocol):
    """A linear layer for few rows."""

    def takes(self, rows: Tensor) -> bool:
        """Return whether the layer can multiply `rows`."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Map [rows, inputs] to float32 [rows, outputs]."""


class CPUQuantizedLinear(QuantizedLinear):
    """A linear layer whose integer products oneDNN computes, if they are exact on this processor."""

    block: ClassVar[int] = 2**18
    """As in the base class. The dequantized values fit into the cache of a core."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.few: FewRows | None = None
        """Compiled code for few rows."""
        self.widens = False
        """True if rows in bfloat16 are multiplied in float32 (wide_linear.py)."""

    @classmethod
    def of(cls, plain: nn.Linear) -> CPUQuantizedLinear:
        """Quantize the weight of a layer, which keeps its own weight. Each row has a scale."""
        weight = plain.weight.detach().float()
        scales = weight.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
        return cls(QuantizedWeight((weight / scales).round_().to(torch.int8), scales), plain.bias)

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, self.in_features)
        if self.few is not None and self.few.takes(flat):
            return self.few(flat).to(rows.dtype).view(*rows.shape[:-1], self.out_features)
        return super().forward(rows)

    def plain_product(self, rows: Tensor) -> Tensor:
        if self.widens and rows.dtype == torch.bfloat16:
            return self.plain_product(rows.float()).to(rows.dtype)
        # Unscaled sums may overflow float16.
        is_scaled = self.scales.shape[1] == 1 and self.zeros is None and self.values.dtype == torch.int8
        if not is_scaled or rows.dtype == torch.float16:
            return super().plain_product(rows)
        out = rows.new_empty(len(rows), self.out_features)
        size = max(CONVERTED // self.in_features, 1)
        parts = self.values.split(size), self.scales.flatten().split(size), out.split(size, 1)
        for values, scales, part in zip(*parts, strict=True):
            weight = values.to(rows.dtype)
            if self.multiply is linear and rows.dtype == torch.float32:
                torch.mm(rows, weight.mul_(scales.unsqueeze(1)).t(), out=part)
            else:  # the scaled weight would be rounded, or the product cannot be written to its place
                torch.mul(self.multiply(rows, weight), scales, out=part)
        return out

    def integer_product(self, rows: Tensor) -> Tensor:
        if is_exact():
            return torch._int_mm(rows, self.values.T)  # noqa: SLF001 - there is no public name
        return super().integer_product(rows)


@cache
def is_exact() -> bool:
    """Return whether torch's products of int8 are exact on this processor.

    Without VNNI, oneDNN adds pairs of products in 16 bits, which saturates for large values.
    """
    large = torch.tensor([[127], [-128]], dtype=torch.int8).expand(-1, _TRIED_WIDTH).contiguous()
    try:
        product = torch._int_mm(large, large.T)  # noqa: SLF001
    except RuntimeError:  # torch was built without oneDNN
        return False
    exact = large.double() @ large.double().T
    return torch.equal(product.double(), exact)
