"""A checkpoint of which only config.json is needed, to judge the checkpoint before it is downloaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind
from mindie_mm.nn.checkpoint.directory import Checkpoint

_TOKENIZER, _TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
_PREPROCESSOR = "preprocessor_config.json"
_OF_THE_TOWER: Mapping[str, str] = {
    "patch_size": "patch_size",
    "vision_patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
    "pooling_kernel_size": "pooling_kernel_size",
    "feature_size": "num_mel_bins",
}
"""Preprocessing settings that must equal settings of the tower, with the names of the latter in config.json."""
_OF_THE_PROCESSOR = ("patch_size", "spatial_merge_size")
"""Settings of the processor that must equal settings in config.json with the same names."""
_SIDES = ("max_image_size", "crop_size", "size")
"""Preprocessing settings that are sides of images. The first one that a class has is the size of the tower's input."""


class UnknownId(int):
    """The id of a token that only tokenizer.json states.

    It equals every id, because the ids in config.json and in the missing file are the same.
    """

    stated: int | None = None
    """The id in config.json with which this id was compared."""

    def __eq__(self, other: object) -> bool:
        self.stated = other if isinstance(other, int) else self.stated
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


class _UnknownIds(dict[str, int]):
    """The vocabulary of a missing tokenizer.json. It has every token, and adds it to `asked`."""

    def __init__(self, known: Mapping[str, int], asked: dict[str, UnknownId]) -> None:
        super().__init__(known)
        self._asked = asked

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, token: str) -> int:
        return self._asked.setdefault(token, UnknownId())


@dataclass(frozen=True)
class ConfigOnly(Checkpoint):
    """A checkpoint directory in which other files than config.json may be missing.

    Defaults that fit the tower in config.json replace a missing preprocessor_config.json. The ids of tokens are unknown
    without a tokenizer.json.
    """

    assumed: set[str] = field(default_factory=set, repr=False, compare=False)
    """Names of the missing files whose contents were assumed. Reading the settings of a family adds to them."""

    unknown_ids: dict[str, UnknownId] = field(default_factory=dict, repr=False, compare=False)
    """Tokens whose ids the family reads, and only a missing tokenizer.json states."""
    unknown_tokens: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Stand-ins for special tokens that only a missing tokenizer_config.json states, by their keys."""

    @classmethod
    def open(cls, path: str | Path | None = None) -> ConfigOnly:
        """Open a checkpoint directory, or the directory of a config.json."""
        if path is not None and Path(path).name == "config.json":
            path = Path(path).parent
        opened = Checkpoint.open(path)
        return cls(opened.path, opened.config)

    def has(self, name: str) -> bool:
        return super().has(name) or (name == _TOKENIZER and self._lacks_tokenizer())

    def json(self, name: str) -> dict[str, Any]:
        if name == _TOKENIZER and not super().has(name) and self._lacks_tokenizer():
            return {"model": {"vocab": {}}, "added_tokens": []}
        if name == "processor_config.json" and not super().has(name):
            return {key: value for key in _OF_THE_PROCESSOR if (value := self.stated_anywhere(key)) is not None}
        return super().json(name)

    def binary(self, name: str) -> bytes:
        if super().has(name):
            return super().binary(name)
        self.assumed.add(name)
        return b""

    def require(self, name: str, keys: Collection[str]) -> dict[str, Any]:
        if super().has(name):
            return super().require(name, keys)
        self.assumed.add(name)
        found = {key: self.stated_anywhere(key) for key in (*keys, *_OF_THE_TOWER)}
        return {key: value for key, value in found.items() if value is not None}

    def preprocessor(self, kind: Kind, classes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        stated, _ = self._stated(kind)
        if not stated:
            classes = {name: self._fitted(defaults) for name, defaults in classes.items()}
        return super().preprocessor(kind, classes)

    def _stated(self, kind: Kind) -> tuple[Mapping[str, Any], str]:
        try:
            return super()._stated(kind)
        except UnsupportedCheckpoint:
            if super().has(_PREPROCESSOR):
                raise
        self.assumed.add(_PREPROCESSOR)
        return {}, "the defaults"

    def ids_of(self, described: Mapping[str, Any]) -> dict[str, int]:
        ids = super().ids_of(described)
        return _UnknownIds(ids, self.unknown_ids) if self._lacks_tokenizer() else ids

    def token_id(self, token: str) -> int:
        return self.ids_of(self.tokenizer_json())[token] if self._lacks_tokenizer() else super().token_id(token)

    def require_special_token(self, *names: str) -> str:
        if self.special_token(names[0]) is None and not super().has(_TOKENIZER_SETTINGS):
            self.assumed.add(_TOKENIZER_SETTINGS)
            return self.unknown_tokens.setdefault(names[0], f"<{names[0]}>")
        return super().require_special_token(*names)

    def _lacks_tokenizer(self) -> bool:
        """Return whether tokenizer.json is missing, also if it was translated. If so, note that ids are unknown."""
        if (self.path / _TOKENIZER).is_file():
            return False
        self.assumed.add(_TOKENIZER)
        return True

    def stated_anywhere(self, key: str) -> Any:
        """Return the value of a key at the top level or in a section of config.json, or None."""
        return self.config.get(key, next(_in_sections(self.config, key), None))

    def _fitted(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of a preprocessing class with the sizes of the tower in config.json."""
        fitted = dict(defaults)
        for name, stated in _OF_THE_TOWER.items():
            value = self.stated_anywhere(stated)
            if name == "patch_size" and "vision_patch_size" in fitted:  # then it is the side of a crop
                continue
            if name == "temporal_patch_size" and fitted.get(name) == 1:  # then the tower's is for videos
                continue
            if isinstance(value, int) and not isinstance(fitted.get(name), Mapping):
                fitted[name] = value
        sides = [fitted[name] for name in _SIDES if isinstance(fitted.get(name), Mapping)]
        side = next(_in_sections(self.config, "image_size"), None)
        side = side[0] if isinstance(side, list) and side else side
        if not sides or not isinstance(side, int):
            return fitted
        usual = next(iter(sides[0].values()))
        for name in _SIDES:
            if isinstance(fitted.get(name), Mapping):
                fitted[name] = {key: value * side // usual for key, value in fitted[name].items()}
        return fitted


def _in_sections(config: Mapping[str, Any], key: str) -> Iterator[Any]:
    """Yield the values of a key in the sections of a config.json. Sections of towers precede those of text models."""
    sections = [(name, value) for name, value in config.items() if isinstance(value, Mapping)]
    for _, section in sorted(sections, key=lambda one: "text" in one[0] or "language" in one[0]):
        if section.get(key) is not None:
            yield section[key]
        yield from _in_sections(section, key)
