"""Small checkpoints quantized by bitsandbytes, and the same weights as ordinary floating-point numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

Weights = dict[str, torch.Tensor]


def dequantized(numbers: torch.Tensor, state: QuantState) -> torch.Tensor:
    """Return a weight of 4 bits. On the CPU, bitsandbytes' own function is wrong if blocks extend over two rows."""
    from bitsandbytes import functional  # two seconds

    packed = numbers.view(torch.uint8).flatten().long()
    values = state.code[torch.stack([packed >> 4, packed & 15], 1).flatten()]
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    return (values * scales.repeat_interleave(state.blocksize)[: len(values)]).view(state.shape)


def pack(folder: Path, settings: Mapping[str, Any], is_packed: Callable[[str, torch.Tensor], bool]) -> Weights:
    """Quantize the checkpoint `folder` in place. `settings` is the quantization_config to write.

    Returns:
        All weights as ordinary numbers. Quantized weights are returned as they are after rounding.
    """
    from bitsandbytes import functional

    stored: Weights = {}
    plain: Weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not is_packed(name, weight):
            plain[name] = stored[name] = weight
        elif settings.get("load_in_8bit"):
            numbers, scales, _ = functional.int8_vectorwise_quant(weight.half())
            stored[name] = numbers
            stored[f"{name.removesuffix('weight')}SCB"] = scales
            stored[f"{name.removesuffix('weight')}weight_format"] = torch.tensor(0, dtype=torch.uint8)
            plain[name] = functional.int8_vectorwise_dequant(numbers, scales)
        else:
            numbers, state = functional.quantize_4bit(
                weight,
                compress_statistics=settings.get("bnb_4bit_use_double_quant", False),
                quant_type=settings["bnb_4bit_quant_type"],
                quant_storage=getattr(torch, settings.get("bnb_4bit_quant_storage", "uint8")),
            )
            stored[name] = numbers
            stored |= {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}
            plain[name] = dequantized(numbers, state)
    save_file({name: weight.contiguous() for name, weight in stored.items()}, folder / "model.safetensors")
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes", **settings}}
    file.write_text(json.dumps(config))
    return plain
