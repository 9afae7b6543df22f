"""Parts of small checkpoints whose sizes are not in the published config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mindie_mm.models._phi4_multimodal_adapters import NAMES, TARGETS

_RANK = 4


def _block(kind: str, width: int, **settings: Any) -> dict[str, Any]:
    """Return the description of a block of MobileNetV5, as timm decodes it from its own short form."""
    own: Mapping[str, Any] = {
        "er": {"exp_kernel_size": 3, "pw_kernel_size": 1, "exp_ratio": 2.0, "force_in_chs": 0, "se_ratio": 0.0},
        "uir": {"dw_kernel_size_mid": 0, "dw_kernel_size_start": 0, "dw_kernel_size_end": 0, "exp_ratio": 2.0},
        "mqa": {"dw_kernel_size": 3, "num_heads": 2, "key_dim": 8, "value_dim": 8, "kv_stride": 2},
    }[kind]
    return {"block_type": kind, "out_chs": width, "stride": 1, "act_layer": None, "noskip": False, **own, **settings}


_MOBILENET = {
    "block_args": [
        [_block("er", 8, stride=2)],
        [_block("uir", 16, stride=2, dw_kernel_size_start=3, dw_kernel_size_mid=5)],
        [_block("uir", 16, stride=2, dw_kernel_size_mid=5), _block("mqa", 16), _block("uir", 16)],
        [_block("uir", 24, stride=2, dw_kernel_size_mid=5), _block("mqa", 24, kv_stride=1), _block("uir", 24)],
    ],
    "stem_size": 8,
}
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "gemma3n_vision": {"model_args": _MOBILENET, "hidden_size": 2048},
    "ernie4_5_vl_moe_text": {"head_dim": 128},
}
"""Settings of sections of config.json, by the section's model_type, in place of smaller sizes.

The width of the features of Gemma 3n's tower is fixed, and so are the rotary sections of ERNIE-4.5-VL.
"""

TOKENS: Mapping[str, Mapping[str, int]] = {
    "kimi_k25": {"<|media_pad|>": 163605},
    "qwen": {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<img>": 151857,
        "</img>": 151858,
        "<imgpad>": 151859,
    },
}
"""Special tokens that only a vocabulary would state, by the model_type of a checkpoint whose family does not ask."""


def write_adapters(network: torch.nn.Module, out: Path) -> None:
    """Write random adapters for the text model of Phi-4-multimodal, which serves media only with them."""
    targets = {
        name: module
        for name, module in network.named_modules()
        if name.startswith("model.layers.") and name.endswith(TARGETS)
    }
    for adapter in NAMES:
        folder = out / f"{adapter}-lora"
        folder.mkdir()
        save_file(dict(_matrices(targets.items())), folder / "adapter_model.safetensors", {"format": "pt"})
        settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK}
        (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _matrices(targets: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, torch.Tensor]]:
    for name, layer in targets:
        outputs, inputs = layer.weight.shape
        for part, shape in (("A", (_RANK, inputs)), ("B", (outputs, _RANK))):
            yield f"base_model.model.{name}.lora_{part}.weight", torch.randn(shape) * 0.05
