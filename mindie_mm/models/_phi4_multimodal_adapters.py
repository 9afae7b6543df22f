"""The adapters of Phi-4-multimodal's text model for images and for audio clips.

Source: arXiv 2503.01743, section 2.2.1 (mixture of LoRAs). The media of a prompt decide which adapter computes all of
its tokens, and those of its answer. A flat batch contains prompts with different adapters, so that the adapters cannot
be merged into the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.weights.stored_tensors import read_weights

NAMES = ("vision", "speech")
"""Names of the adapters. A prompt's adapter is stated by its index + 1, or 0 for no adapter."""
TARGETS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""Linear layers of each decoder layer that have adapters."""
_NEEDED = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
}
"""Settings of peft that the adapters must have."""
_IN_FOLDER = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.([\w.]+)\.lora_([AB])\.weight")
_IN_WEIGHTS = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.lora_([AB])\.(\w+)\.weight")

Key = tuple[int, str, str]
"""Index of a decoder layer, name of its linear layer, and A or B."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of the text model."""

    scale: float
    """Factor of the adapter's output, lora_alpha / r."""
    weights: Mapping[Key, Tensor]


def read_adapters(checkpoint: Checkpoint) -> list[Adapter]:
    """Return the adapters, in the order of `NAMES`.

    In transformers' layout, they are in folders of their own. In the original layout, they are among the weights.

    Raises:
        UnsupportedCheckpoint: An adapter is missing, or cannot be read.

    """
    if not checkpoint.renamings:
        return [_from_folder(checkpoint.path / f"{name}-lora") for name in NAMES]
    found: dict[str, dict[Key, Tensor]] = {name: {} for name in NAMES}
    for weight_name, weight in read_weights(checkpoint):
        if (match := _IN_WEIGHTS.fullmatch(weight_name)) and match[4] in found:
            found[match[4]][int(match[1]), match[2], match[3]] = weight
    settings = (checkpoint.config.get(f"{name}_lora") for name in NAMES)
    return [
        Adapter(_scale(stated, f"{checkpoint.path}: {name}_lora in config.json"), found[name])
        for name, stated in zip(NAMES, settings, strict=True)
    ]


def _from_folder(folder: Path) -> Adapter:
    scale, weights = _scale(_settings(folder), str(folder / "adapter_config.json")), {}
    file = folder / "adapter_model.safetensors"
    for name, weight in _read(file):
        if (match := _IN_FOLDER.fullmatch(name)) is None:
            raise UnsupportedCheckpoint(f"{file} has the weight {name}, which no layer of the text model has")
        weights[int(match[1]), match[2], match[3]] = weight
    return Adapter(scale, weights)


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return the contents of a folder's adapter_config.json. Raise UnsupportedCheckpoint for unsupported settings."""
    file = folder / "adapter_config.json"
    try:
        settings: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedCheckpoint(
            f"{folder} has no readable adapter: {error}. The model computes prompts with images or audio clips with "
            f"its adapters; copy the folders {' and '.join(f'{name}-lora' for name in NAMES)} from the original "
            "repository"
        ) from error
    for name, needed in _NEEDED.items():
        if (value := settings.get(name, needed)) != needed:
            raise UnsupportedCheckpoint(f"{file}: {name} is {value!r}; only {needed!r} is supported")
    for name in ("rank_pattern", "alpha_pattern"):
        if settings.get(name):
            raise UnsupportedCheckpoint(f"{file}: {name} is {settings[name]!r}; only one rank for all layers works")
    return settings


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                yield name, weights.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UnsupportedCheckpoint(f"{file} cannot be read: {error}. Download it again") from error


def _scale(settings: Any, where: str) -> float:
    try:
        return float(settings["lora_alpha"] / settings["r"])
    except (TypeError, KeyError, ZeroDivisionError) as error:
        raise UnsupportedCheckpoint(f"{where} must state the numbers lora_alpha and r") from error


class AdapterChoice:
    """The adapter of each row of the current batch."""

    def __init__(self, ranks: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        """Create a choice without rows.

        Args:
            ranks: Rank of each adapter.
            device: Device of the model.
            dtype: Dtype of the model.

        """
        numbers = torch.arange(1, len(ranks) + 1).repeat_interleave(torch.tensor(ranks))
        self._numbers = numbers.to(device)
        self._dtype = dtype
        self.mask = torch.empty(0, device=device)
        """1 for each column that belongs to the adapter of its row, else 0, [T, sum of ranks]."""

    def placed(self, weights: Tensor) -> Tensor:
        """Return weights of an adapter on the model's device and in its dtype."""
        return weights.to(self._numbers.device, self._dtype)

    def set(self, numbers: Tensor) -> None:
        """Set the number of the adapter of each row, int64 [T]. 0 means no adapter."""
        self.mask = (numbers.unsqueeze(1) == self._numbers).to(self._dtype)


class AdaptedLinear(nn.Module):
    """A linear layer with adapters. Each adapter changes some rows. All adapters are one pair of matrix products."""

    def __init__(self, base: nn.Linear, adapters: Sequence[tuple[Tensor, Tensor]], choice: AdapterChoice) -> None:
        """Wrap a layer.

        Args:
            base: The layer without adapters. Its weight may be quantized.
            adapters: Matrices A, [rank, inputs], and B, [outputs, rank], of each adapter. B includes the scale.
            choice: The adapter of each row.

        """
        super().__init__()
        self.base = base
        down, up = torch.cat([first for first, _ in adapters]), torch.cat([second for _, second in adapters], 1)
        self.down, self.up = (nn.Parameter(choice.placed(part), requires_grad=False) for part in (down, up))
        self._choice = choice

    def forward(self, rows: Tensor) -> Tensor:
        """Return the outputs, [..., T, outputs], for rows [..., T, inputs]."""
        out: Tensor = self.base(rows)
        low = nn.functional.linear(rows, self.down) * self._choice.mask
        return out + nn.functional.linear(low, self.up)


def adapt(
    layers: Iterable[nn.Module], adapters: Sequence[Adapter], device: torch.device, dtype: torch.dtype, where: str
) -> AdapterChoice:
    """Give the decoder's layers their adapters.

    Args:
        layers: The decoder's layers.
        adapters: The adapters.
        device: Device of the model.
        dtype: Dtype of the model.
        where: Name of the checkpoint in error messages.

    Returns:
        The choice, which must be set before the layers run.

    Raises:
        UnsupportedCheckpoint: A matrix is missing, is not needed, or has a wrong shape.

    """
    left = [dict(adapter.weights) for adapter in adapters]
    ranks = [_rank(weights, name, where) for weights, name in zip(left, NAMES, strict=True)]
    choice = AdapterChoice(ranks, device, dtype)
    for index, layer in enumerate(layers):
        for target in TARGETS:
            base: Any = layer.get_submodule(target)
            pairs = [
                _pair(weights, (index, target), base, rank, f"{where}: the {name} adapter")
                for weights, rank, name in zip(left, ranks, NAMES, strict=True)
            ]
            scaled = [(first, second * adapter.scale) for (first, second), adapter in zip(pairs, adapters, strict=True)]
            layer.set_submodule(target, AdaptedLinear(base, scaled, choice))
    for weights, name in zip(left, NAMES, strict=True):
        if weights:
            raise UnsupportedCheckpoint(f"{where}: the {name} adapter has weights of other layers: {min(weights)}")
    return choice


def _rank(weights: Mapping[Key, Tensor], name: str, where: str) -> int:
    if (first := weights.get((0, TARGETS[0], "A"))) is None:
        raise UnsupportedCheckpoint(
            f"{where} lacks the weights of the {name} adapter, with which the model computes prompts with images or "
            "audio clips. Copy all weight files from the original repository"
        )
    return len(first)


def _pair(
    weights: dict[Key, Tensor], place: tuple[int, str], base: Any, rank: int, where: str
) -> tuple[Tensor, Tensor]:
    """Take the matrices A and B of a linear layer out of `weights`. Raise UnsupportedCheckpoint if they do not fit."""
    outputs, inputs = base.out_features, base.in_features
    pair = []
    for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
        weight = weights.pop((*place, part), None)
        if weight is None or tuple(weight.shape) != shape:
            found = "is missing" if weight is None else f"has the shape {tuple(weight.shape)} instead of {shape}"
            raise UnsupportedCheckpoint(f"{where}: lora_{part} of layer {place[0]}, {place[1]}, {found}")
        pair.append(weight)
    return pair[0], pair[1]
