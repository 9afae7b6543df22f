"""Products of 8-bit integers on the CPU, for checkpoints with quantized weights and activations."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from mindie_mm.device.quantized_linear import QuantizedLinear

_TRIED_WIDTH = 64
"""Number of inputs in the trial. It is longer than a register of any processor."""


class CPUQuantizedLinear(QuantizedLinear):
    """A linear layer whose integer products oneDNN computes, if they are exact on this processor."""

    block: ClassVar[int] = 2**18
    """As in the base class. The dequantized values fit into the cache of a core."""

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
