"""Linear layers with int8 weights. They read a quarter of the memory that layers with float32 weights read.

Weights are quantized per output channel when a model is loaded, and activations per row when the layer runs. A row's
result does not depend on the other rows, so an answer does not depend on its neighbors in the batch.
"""

from __future__ import annotations

import platform
import time
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device.choices import choose, forced

_ENGINES = ("fbgemm", "onednn")
"""torch's libraries for int8 products."""
_WIDTH = 1024
"""Input and output width of the layer in the trial."""
_PROMPT_ROWS, _STEPS, _TURNS = 256, 64, 5
"""The trial compares the times of a prompt of `_PROMPT_ROWS` tokens with an answer of `_STEPS` tokens. Each product is
timed `_TURNS` times."""


class Int8Linear(nn.Module):
    """An nn.Linear with an int8 weight, for inference only. The input must be float32."""

    def __init__(self, linear: nn.Linear, engine: str) -> None:
        """Quantize the weight of a float32 layer.

        Args:
            linear: The layer. It keeps its own weight.
            engine: A quantized engine of torch, such as fbgemm.

        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = None  # transformers' T5 asks for its dtype
        self.bias = linear.bias
        self._packed = _packed(linear.weight.detach(), engine)
        self._reduces_range = not choose("vnni", torch.cpu._is_vnni_supported)  # noqa: SLF001 - there is no public name
        """Whether activations have 7 bits. Without VNNI, the sum of two 8-bit products does not fit into 16 bits."""
        self._range = torch.zeros(linear.in_features)
        """A row with the minimum and the maximum of all scaled rows."""
        self._range[0], self._range[-1] = -1, 1

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        flat = rows.reshape(-1, self.in_features)
        largest = torch.linalg.vector_norm(flat, torch.inf, -1, keepdim=True)
        # torch quantizes all rows with the same scale, from their minimum to their maximum. Scaling each row to [-1, 1]
        # and adding a row that contains -1 and 1 makes this scale a constant.
        scaled = flat.new_empty(len(flat) + 1, self.in_features)
        torch.div(flat, largest, out=scaled[:-1])
        scaled.nan_to_num_()  # from zeros, or from non-finite rows, which stay non-finite in the result
        scaled[-1] = self._range
        out = torch.ops.quantized.linear_dynamic(scaled, self._packed, self._reduces_range)[:-1] * largest
        if self.bias is not None:
            out += self.bias
        result: Tensor = out.view(*rows.shape[:-1], self.out_features)
        return result


def int8_linear(linear: nn.Linear) -> Int8Linear:
    """Return a layer with the weights of `linear` in int8. It uses the library that is fastest on this processor."""
    return Int8Linear(linear, forced("int8") or _fastest_engine())


def has_int8() -> bool:
    """Return whether torch can multiply int8 on this processor."""
    return bool(_engines())


def _engines() -> list[str]:
    if platform.machine() != "x86_64":  # not tested on other architectures
        return []
    supported = torch.backends.quantized.supported_engines
    return [name for name in _ENGINES if name in supported]


@cache
def _fastest_engine() -> str:
    """Return the engine that computes a request of average length fastest. The trial takes about 100 ms."""
    linear = nn.Linear(_WIDTH, _WIDTH, bias=False)
    layers = {name: Int8Linear(linear, name) for name in _engines()}
    if len(layers) == 1:
        return next(iter(layers))
    step, prompt = torch.randn(1, _WIDTH), torch.randn(_PROMPT_ROWS, _WIDTH)
    best = dict.fromkeys(layers, (float("inf"), float("inf")))
    for _ in range(_TURNS):  # alternate, and take the minimum, because other load only adds time
        for name, layer in layers.items():
            best[name] = min(best[name][0], seconds(layer, step)), min(best[name][1], seconds(layer, prompt))
    return min(layers, key=lambda name: best[name][0] * _STEPS + best[name][1])


def seconds(layer: nn.Module, rows: Tensor) -> float:
    """Return the time of one call of `layer`."""
    with torch.inference_mode():
        began = time.perf_counter()
        layer(rows)
        return time.perf_counter() - began


def _packed(weight: Tensor, engine: str) -> Any:
    """Return `weight`, float32 [outputs, inputs], as int8 in the layout of `engine`."""
    scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    values = (weight / scales.unsqueeze(1)).round_().to(torch.int8)
    zero_points = torch.zeros(len(weight), dtype=torch.int64)
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = engine
        with warnings.catch_warnings():
            # torch deprecates tensors of quantized dtypes, but has no other argument for these products.
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch._make_per_channel_quantized_tensor(values, scales, zero_points, 0)  # noqa: SLF001
            return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = before
