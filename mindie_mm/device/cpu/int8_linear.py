"""Linear layers with int8 weights, which take a quarter of the memory of float32 weights.

Each row of a weight has its own scale. Activations are not quantized, so every step computes the same function, and a
row of the result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_BLOCK = 2**20
"""Maximum number of weights that are converted to the dtype of the activations at a time. They fit into the cache."""


class FewRows(Protocol):
    """A linear layer for few rows."""

    def takes(self, rows: Tensor) -> bool:
        """Return whether the layer can multiply `rows`."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Map [rows, inputs] to float32 [rows, outputs]."""


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and one scale per row, for inference only."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """Wrap tensors without copying them.

        Args:
            weight: int8 [outputs, inputs].
            scales: float32 [outputs], the factors of the rows of `weight`.
            bias: [outputs], or None.

        """
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = bias
        self.multiply: Callable[[Tensor, Tensor], Tensor] = linear
        """Function that multiplies rows by a weight of the same dtype."""
        self.few: FewRows | None = None
        """Compiled code for few rows, which reads the weight without converting it."""

    @classmethod
    def of(cls, plain: nn.Linear) -> Int8Linear:
        """Quantize the weight of a layer, which keeps its own weight."""
        weight = plain.weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        return cls((weight / scales.unsqueeze(1)).round_().to(torch.int8), scales, plain.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., inputs] in float32 or bfloat16 to [..., outputs]."""
        outputs, inputs = self.weight.shape
        flat = rows.reshape(-1, inputs)
        if self.few is not None and self.few.takes(flat):
            return self.few(flat).to(rows.dtype).view(*rows.shape[:-1], outputs)
        out = flat.new_empty(len(flat), outputs)
        size = max(_BLOCK // inputs, 1)
        parts = (tensor.split(size) for tensor in (self.weight, self.scales))
        for weight, scales, part in zip(*parts, out.split(size, 1), strict=True):
            torch.mul(self.multiply(flat, weight.to(rows.dtype)), scales, out=part)
        if self.bias is not None:
            out += self.bias
        return out.view(*rows.shape[:-1], outputs)
