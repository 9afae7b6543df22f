"""Contract of every family with its own layers: each key of the original config.json is changed in turn.

The key must have the same effect as in the original code, be refused by name, or have no effect.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from mindie_mm.device import open_device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import family_named
from mindie_mm.nn.checkpoint.config_keys import HOUSEKEEPING, Keys, Nullable, Required
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import Model

IDS = torch.arange(3, 40)
"""Token ids of a text prompt."""


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` with `changes`. A name `section.key` refers to a key of a section."""
    other: dict[str, Any] = json.loads(json.dumps(config))
    for name, value in changes.items():
        *sections, key = name.split(".")
        part = other
        for section in sections:
            part = part.setdefault(section, {})
        part[key] = value
    return other


def names(keys: Keys, prefix: str = "") -> Iterator[str]:
    """Yield the names of all keys. The name of a section's key is `section.key`."""
    for name in (*keys.read, *keys.only, *keys.unused):
        yield f"{prefix}{name}"
    for name, section in keys.sections.items():
        yield from names(section, f"{prefix}{name}.")


def served_values(keys: Keys, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the names of keys that allow only certain values, together with the allowed values."""
    for name, served in keys.only.items():
        yield f"{prefix}{name}", served
    for name, section in keys.sections.items():
        yield from served_values(section, f"{prefix}{name}.")


def mistyped_values(keys: Keys, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each key that the family reads, with values of wrong types."""
    for name, default in keys.read.items():
        kind = default.kind if isinstance(default, Required | Nullable) else type(default)
        values: list[Any] = ["8", {"a": 8}, float("nan")]
        values += [[8]] if kind in (int, float, bool) else [8, ["8"], [1.5]]
        values += [True] if kind in (int, float) else []
        values += [8.5] if kind is int else []
        yield f"{prefix}{name}", values if isinstance(default, Nullable | bool) else [*values, None]
    for name, section in keys.sections.items():
        yield from mistyped_values(section, f"{prefix}{name}.")


def keys_of(family: str) -> Keys:
    """Return the keys that a family declares."""
    keys: Keys = importlib.import_module(family_named(family).__module__).KEYS
    return keys


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply the RMS norm that the decoders of these families use."""
    return weight * (hidden * (hidden.square().mean(-1, keepdim=True) + eps).rsqrt())


def turned(heads: torch.Tensor, base: float) -> torch.Tensor:
    """Apply rotary embeddings to [heads, tokens, width].

    Each number is paired with the number at the same place in the other half.
    """
    width = heads.shape[-1]
    angles = torch.outer(torch.arange(heads.shape[1]).float(), base ** -(torch.arange(0, width, 2) / width))
    first, second = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def layer_of(weights: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the weights whose names begin with `prefix`. The prefix is removed from their names."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


class KeysContract:
    """Tests for a family's keys. The subclass computes the logits of `IDS` in plain PyTorch, for a small checkpoint."""

    name: ClassVar[str]
    refused: ClassVar[Mapping[str, Any]]
    """Unsupported values by key."""
    honoured: ClassVar[Mapping[str, Any]]
    """Supported values other than the checkpoint's, by key. An entry may also change several keys together."""
    towers: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Changes of keys of the vision tower. Each must change the features."""
    unused: ClassVar[Mapping[str, Any]]
    """Values other than the default, by key, for keys that have no effect."""
    sizes: ClassVar[frozenset[str]]
    """Keys that are checked against the shapes of the weights, or that other entries of this class change as well."""

    @classmethod
    def write_checkpoint(cls, out: Path) -> None:
        """Write a small checkpoint into the directory `out`."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        out = tmp_path_factory.mktemp("keys")
        cls.write_checkpoint(out)
        return out

    def reference(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits of `IDS`, float32 [tokens, vocabulary]. `config` contains all keys that affect them."""
        raise NotImplementedError

    def weights(self, path: Path) -> Mapping[str, torch.Tensor]:
        """Return the weights of the checkpoint by name."""
        return load_file(path / "model.safetensors")

    def features(self, model: Model) -> torch.Tensor:
        """Return the tower's features for an image."""
        raise NotImplementedError

    @classmethod
    def checkpoint(cls, path: Path, changes: Mapping[str, Any]) -> Checkpoint:
        own = Checkpoint.open(path)
        return replace(own, config=changed(own.config, changes))

    @classmethod
    def load(cls, path: Path, changes: Mapping[str, Any]) -> Model:
        family, checkpoint = family_named(cls.name), cls.checkpoint(path, changes)
        processor = family.processor(checkpoint)
        model = family.model(checkpoint, processor, open_device("cpu"), torch.float32)
        assert isinstance(model, Model)
        return model

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, path: Path) -> Model:
        return cls.load(path, {})

    def test_every_key_is_tried(self) -> None:
        tried = {*self.refused, *self.honoured, *self.towers, *self.unused, *self.sizes}
        assert tried - HOUSEKEEPING >= {*names(keys_of(self.name))} - HOUSEKEEPING

    def test_the_reference_equals_the_model(self, path: Path, base: Model) -> None:
        expected = self.reference(self.weights(path), Checkpoint.open(path).config)
        assert (base.logits(IDS) - expected).abs().max() <= 1e-4

    def test_unsupported_values_are_refused_by_name(self, path: Path) -> None:
        family, served = family_named(self.name), []
        for name, value in self.refused.items():
            try:
                family.processor(self.checkpoint(path, {name: value}))
                served.append(name)
            except UnsupportedCheckpoint as error:
                assert re.search(f"{re.escape(name)}(=| is ){re.escape(repr(value))}", str(error))  # noqa: PT017 - one test covers all keys
        assert not served

    def test_values_of_another_type_are_refused_by_name(self, path: Path) -> None:
        family = family_named(self.name)
        for name, values in mistyped_values(keys_of(self.name)):
            for value in values:
                with pytest.raises(UnsupportedCheckpoint, match=re.escape(f"{name}={value!r} must be ")):
                    family.processor(self.checkpoint(path, {name: value}))

    def test_keys_are_honoured_as_in_the_original(self, path: Path, base: Model) -> None:
        own = base.logits(IDS)
        for name, value in self.honoured.items():
            changes = value if isinstance(value, dict) else {name: value}
            logits = self.load(path, changes).logits(IDS)
            expected = self.reference(self.weights(path), changed(Checkpoint.open(path).config, changes))
            assert (logits - expected).abs().max() <= 1e-4, name
            assert (logits - own).abs().max() > 1e-3, name

    def test_keys_of_the_tower_change_the_features(self, path: Path, base: Model) -> None:
        own = self.features(base)
        for name, changes in self.towers.items():
            assert (self.features(self.load(path, changes)) - own).abs().max() > 1e-4, name

    def test_other_keys_change_nothing(self, path: Path, base: Model) -> None:
        other = self.load(path, self.unused)
        assert torch.equal(other.logits(IDS), base.logits(IDS))
        assert torch.equal(self.features(other), self.features(base))

    def test_null_equals_a_missing_key_unless_true_is_needed(self, path: Path) -> None:
        family = family_named(self.name)
        for name, served in served_values(keys_of(self.name)):
            other = self.checkpoint(path, {name: None})
            if True in served:
                with pytest.raises(UnsupportedCheckpoint, match=f"{name} is None"):
                    family.processor(other)
            else:
                family.processor(other)

    def test_unknown_keys_are_named(self, path: Path) -> None:
        family, own = family_named(self.name), Checkpoint.open(path)
        assert family.unknown_keys(own) == []
        sections = [name for name, value in own.config.items() if isinstance(value, dict)]
        other = self.checkpoint(path, {"hiden_size": 7, **{f"{section}.widht": 1 for section in sections}})
        assert family.unknown_keys(other) == [*(f"{section}.widht" for section in sections), "hiden_size"]
