"""Linear layers with 8-bit weights and inputs on an NPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mindie_mm.device.npu import npu_products
from mindie_mm.device.npu.npu_kernels import HALF, works
from mindie_mm.device.quantized_linear import QuantizedLinear, QuantizedWeight


class NPUQuantizedLinear(QuantizedLinear):
    """A layer whose input is rounded and multiplied by two operators, after a trial."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None) -> None:
        super().__init__(weight, bias)
        self.register_buffer("row_scales", self.scales.flatten(), persistent=False)
        if self.input_scale is not None:  # npu_quantize takes a number for each input
            factors = torch.full((self.in_features,), 1 / self.input_scale, device=self.values.device)
            self.register_buffer("factors", factors, persistent=False)
            self.register_buffer("offsets", torch.full_like(factors, self.input_offset), persistent=False)
        self.register_buffer("float_bias", None if bias is None else bias.detach().float(), persistent=False)

    row_scales: Tensor
    factors: Tensor
    offsets: Tensor
    float_bias: Tensor | None

    def forward(self, rows: Tensor) -> Tensor:
        operator = npu_products.DYNAMIC if self.input_scale is None else npu_products.STATIC
        fits = max(self.in_features, self.out_features) <= npu_products.MOST_INPUTS
        if not self.rounds_input or rows.dtype not in HALF or not fits or not rows.numel():
            return super().forward(rows)
        if not works(operator, rows.device, rows.dtype, self.out_features, self.in_features):
            return super().forward(rows)
        flat = rows.reshape(-1, self.in_features)
        if self.input_scale is None:
            out = npu_products.multiply_dynamic(flat, self.values, self.row_scales, self.float_bias)
        else:
            assert self.product_scales is not None
            assert self.sum_bias is not None
            constants = self.factors, self.offsets, self.product_scales, self.sum_bias
            out = npu_products.multiply_static(flat, self.values, *constants)
            if self.bias is not None:
                out = out + self.bias
        return out.view(*rows.shape[:-1], self.out_features)
