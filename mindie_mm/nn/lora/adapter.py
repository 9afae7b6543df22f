"""A LoRA adapter (Hu et al., 2021, arXiv 2106.09685): its files, and its change of each layer.

Adapters are read from folders that peft writes. Only safetensors files are read, because pickles run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.nn.lora.adapter_config import WEIGHTS, AdapterConfig, digest_of, read_config
from mindie_mm.nn.lora.change import Change
from mindie_mm.nn.lora.targets import Target, Targets

_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_PREFIX = "base_model.model."
_OWN_WEIGHT = ".base_layer.weight"
"""End of the name of a layer's own weight, which peft stores beside the change of an output layer."""
_PARTS: Mapping[str, str] = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "b_bias",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".base_layer.bias": "bias",
    ".bias": "bias",
    _OWN_WEIGHT: "weight",
    ".weight": "weight",
}
"""Ends of the names of tensors, longest first, and the parts of a layer's change that they contain."""
_DTYPES = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter whose files have been read."""

    key: str
    """Digest of the files. Adapters with equal keys are equal."""
    changes: tuple[Change, ...]
    in_tower: bool = field(init=False)
    """True if the adapter changes features of media."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_tower", any(not one.target.in_text for one in self.changes))

    def num_values(self) -> int:
        """Return the number of values in all tensors."""
        return sum(tensor.numel() for one in self.changes for tensor in one.tensors().values())


class AdapterFiles:
    """The files of an adapter, which have been read and fit to the base model."""

    def __init__(self, folder: Path, targets: Targets, max_rank: int) -> None:
        """Read the files.

        Args:
            folder: Folder that contains adapter_config.json and adapter_model.safetensors.
            targets: Layers of the base model.
            max_rank: Maximum rank of a change.

        Raises:
            InputError: The folder does not exist, or is not the folder of an adapter.
            UnsupportedCheckpoint: The adapter uses a setting that is not served, is damaged, or was trained on another
                base model.
            LimitExceeded: The rank of a layer exceeds `max_rank`.

        """
        config, stated = read_config(folder)
        file = weights_file(folder)
        self._reading = _Reading(folder, config, targets, max_rank)
        try:
            with safe_open(file, "pt") as opened:  # the header, so that wrong weights are never read
                header = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                shapes = {name: tuple(one.get_shape()) for name, one in header.items()}
                self._reading.check(shapes, {name: one.get_dtype() for name, one in header.items()})
            data = file.read_bytes()
            self._tensors = load(data)
        except (SafetensorError, OSError, ValueError) as error:
            raise UnsupportedCheckpoint(f"{file} cannot be read: {error}") from error
        if {name: tuple(tensor.shape) for name, tensor in self._tensors.items()} != shapes:
            raise UnsupportedCheckpoint(f"{file} has changed while it was read; load it again")
        self.key = digest_of(stated, data)

    def adapter(self, dtype: torch.dtype) -> Adapter:
        """Return the adapter of a model of `dtype`. Every rank must call this method.

        Raises:
            UnsupportedCheckpoint: A change is not finite.

        """
        return Adapter(self.key, tuple(self._reading.changes(self._tensors, dtype)))


def weights_file(folder: Path) -> Path:
    """Return the file with an adapter's weights. Raise UnsupportedCheckpoint if there is none, or only a pickle."""
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    if pickles := [name for name in _PICKLES if (folder / name).exists()]:
        raise UnsupportedCheckpoint(
            f"{folder} has its weights in {pickles[0]}, a pickle, which could run code and is not read; save the "
            "adapter again with peft's save_pretrained, which writes safetensors"
        )
    raise UnsupportedCheckpoint(f"{folder} has no weights; the file {WEIGHTS} is missing. Save the adapter again")


class _Reading:
    """The reading of one adapter: checks of its names and shapes, and the changes of layers."""

    def __init__(self, folder: Path, config: AdapterConfig, targets: Targets, max_rank: int) -> None:
        self._folder = folder
        self._config = config
        self._targets = targets
        self._max_rank = max_rank
        self._names: dict[str, dict[str, str]] = {}
        """Name of the tensor with each part, by the name of the layer in the adapter."""
        self._found: dict[str, Target] = {}

    def check(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> None:
        """Raise an error unless all tensors belong to layers of the base model, with the right shapes and data types.

        `shapes` and `dtypes` are those of each tensor, by its name.
        """
        if not shapes:
            raise UnsupportedCheckpoint(f"{self._folder} has no weights; {WEIGHTS} contains no tensor")
        for name in shapes:
            if dtypes[name] not in _DTYPES:
                raise self._refused(name, f"has the data type {dtypes[name]}; it must be one of {', '.join(_DTYPES)}")
            layer, part = self._split(name)
            known = self._names.setdefault(layer, {})
            if part in known:
                raise self._refused(name, f"is given twice, also as {known[part]}")
            known[part] = name
        for layer, parts in self._names.items():
            self._check_layer(layer, parts, shapes)

    def changes(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[Change]:
        """Return the changes of all layers of a model of `dtype`."""
        changes = []
        for layer, parts in self._names.items():
            own = {part: tensors[name] for part, name in parts.items()}
            changes.append(Change.of(self._found[layer], own, self._config.scaling_of(layer), dtype))
        for layer, change in zip(self._names, changes, strict=True):  # after all sums over ranks
            if not all(bool(torch.isfinite(tensor).all()) for tensor in change.tensors().values()):
                raise self._refused(
                    layer,
                    f"has a change that is not finite in {dtype}; the file is damaged, or lora_alpha is too large",
                )
        return changes

    def _split(self, name: str) -> tuple[str, str]:
        """Return the name of the layer, and the part of its change that a tensor contains."""
        plain = name.removeprefix(_PREFIX).replace(".modules_to_save.", ".")
        for end, part in _PARTS.items():
            if plain.endswith(end) and ".lora_" not in plain.removesuffix(end):
                return plain.removesuffix(end), part
        raise self._refused(name, "is not served; only changes of linear layers, and whole weights and biases, are")

    def _check_layer(self, layer: str, parts: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        first = next(iter(parts.values()))
        target = self._targets.find(layer)
        if target is None:
            kind = (
                "an expert, and changes of experts are" if ".experts" in layer else "no linear layer of the model, or"
            )
            raise self._refused(
                first, f"changes {layer}, which is {kind} not served. {self._base()}, or merge it (merge_and_unload)"
            )
        if target in self._found.values():
            raise self._refused(first, f"changes {layer}, which the file also changes under another name")
        self._check_parts(first, target, parts)
        has_change = "a" in parts
        rank = shapes[parts["a"]][0] if has_change and shapes[parts["a"]] else 0
        outputs, inputs = target.whole
        expected = {
            "a": (rank, inputs),
            "b": (outputs, rank),
            "b_bias": (outputs,),
            "magnitude": (outputs,),
            "bias": (outputs,),
            "weight": (inputs, outputs) if target.is_embedding else (outputs, inputs),
        }
        for part, name in parts.items():
            if shapes[name] != expected[part]:
                raise self._refused(
                    name, f"has shape {list(shapes[name])} instead of {list(expected[part])}. {self._base()}"
                )
        if has_change:
            self._check_rank(layer, parts["a"], rank)
        self._found[layer] = target

    def _check_parts(self, first: str, target: Target, parts: Mapping[str, str]) -> None:
        """Raise UnsupportedCheckpoint unless the parts of a layer's change belong together. `first` is one of them."""
        has_change = "a" in parts or "b" in parts
        if has_change and not {"a", "b"} <= parts.keys():
            raise self._refused(first, "has no counterpart: lora_A or lora_B is missing; the file is damaged")
        if ("magnitude" in parts) != (has_change and self._config.has_magnitudes):
            raise self._refused(first, "has a magnitude without use_dora, or no magnitude with it; the file is damaged")
        if target.is_embedding and parts.keys() != {"weight"}:
            raise self._refused(
                first, "is a change of an embedding; only whole embeddings (modules_to_save) are served"
            )
        if "weight" in parts and has_change and not parts["weight"].endswith(_OWN_WEIGHT):
            raise self._refused(first, "is both changed and replaced, which is not served")
        if {"magnitude", "b_bias"} <= parts.keys():
            raise self._refused(
                first, "has both a magnitude (use_dora) and a bias (lora_bias), as in no adapter of peft"
            )
        if target.hides_bias and parts.keys() & {"magnitude", "bias", "weight"}:
            raise self._refused(
                first,
                "changes a layer that is quantized together with its bias; only lora_A and lora_B are served there",
            )

    def _check_rank(self, layer: str, name: str, rank: int) -> None:
        if rank > self._max_rank:
            raise LimitExceeded(
                f"{self._folder}: {name} has rank {rank}; the limit is {self._max_rank}. Raise max_lora_rank"
            )
        if rank != (stated := self._config.rank_of(layer)):
            raise self._refused(
                name, f"has rank {rank}, but adapter_config.json states {stated}; the files do not match"
            )

    def _base(self) -> str:
        base = self._config.base
        return f"Serve the adapter with its own base model{f', {base}' if base else ''}"

    def _refused(self, name: str, why: str) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(f"{self._folder}: {name} {why}")
