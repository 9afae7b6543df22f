"""The settings of a LoRA adapter, from the file adapter_config.json that peft writes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from mindie_mm.errors import InputError, UnsupportedCheckpoint, os_errors_as

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MAX_BYTES = 2**20
_DIGEST_CHARACTERS = 32
_IGNORED = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "task_type",
        "peft_type",
        "peft_version",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
        "megatron_core",
        "qalora_group_size",
    ]
)
"""Keys that do not change what a trained adapter computes: its weights state which layers it changes."""
_SERVED = frozenset(
    [
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "bias",
        "lora_bias",
        "fan_in_fan_out",
        "init_lora_weights",
    ]
)
_BIASES = ("none", "all", "lora_only")
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the weights of the base model as they are."""
_PATTERN = re.compile(r"(?:[\w^$|-]|\\\.|\.\*?)*")
"""Regular expressions that are accepted as names of layers. Matching others may take exponential time."""
_MAX_PATTERN = 500
_MAX_PATTERNS = 4096
_MAX_RANK = 2**14
_MAX_ALPHA = 1e6
Patterns = tuple[tuple[re.Pattern[str], float], ...]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings that the weights do not state."""

    rank: int
    alpha: float
    alpha_pattern: Patterns
    """Regular expressions for names of layers, each with the alpha of the layers whose names match."""
    rank_pattern: Patterns
    has_stable_rank: bool
    """True if changes are scaled by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732) instead of alpha / rank."""
    has_magnitudes: bool
    """True if layers have magnitudes (DoRA, arXiv 2402.09353)."""
    base: str
    """Name of the base model, or an empty string."""

    @property
    def most_rank(self) -> int:
        """The largest rank of a layer."""
        return max([self.rank, *(int(rank) for _, rank in self.rank_pattern)])

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer, by its name in the adapter."""
        return int(_matching(self.rank_pattern, layer, self.rank))

    def scaling_of(self, layer: str) -> float:
        """Return the factor of the change of a layer."""
        rank, alpha = self.rank_of(layer), _matching(self.alpha_pattern, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.has_stable_rank else rank)


def read_config(folder: Path) -> tuple[AdapterConfig, bytes]:
    """Read the settings of an adapter. Return them, and the content of the file.

    Raises:
        InputError: The folder is not a folder, or has no such file.
        UnsupportedCheckpoint: The file cannot be read, or has a setting that is not served.

    """
    file = folder / CONFIG
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; give the folder of a LoRA adapter, which contains {CONFIG}")
        if not file.is_file():
            what = "is a checkpoint, not an adapter" if (folder / "config.json").is_file() else f"has no {CONFIG}"
            raise InputError(
                f"{folder} {what}; give the folder that peft's save_pretrained has written for the adapter"
            )
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise UnsupportedCheckpoint(f"{file} has {size} bytes; the limit is {_MAX_BYTES}")
        data = file.read_bytes()
    try:
        given = msgspec.json.decode(data)  # which refuses names that no message can contain
    except (ValueError, RecursionError) as error:
        raise UnsupportedCheckpoint(f"{file} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise UnsupportedCheckpoint(f"{file} is of type {type(given).__name__}; it must be an object")
    return _checked(file, given), data


def digest_of(settings: bytes, weights: bytes) -> str:
    """Return the digest of the contents of an adapter's files. Adapters with equal digests are equal."""
    return blake3(settings + b"\0" + weights).hexdigest()[:_DIGEST_CHARACTERS]


def _checked(file: Path, given: Mapping[str, Any]) -> AdapterConfig:
    wrong = next(((key, why) for key, fits, why in _RULES if not fits(given.get(key))), None)
    if wrong is not None:
        raise UnsupportedCheckpoint(f"{file}: {wrong[0]}={given.get(wrong[0])!r:.{_MAX_PATTERN}} {wrong[1]}")
    for key, value in given.items():
        if key not in _IGNORED | _SERVED and value not in (None, False, {}, [], "", 0):
            raise UnsupportedCheckpoint(
                f"{file}: {key:.{_MAX_PATTERN}}={value!r:.{_MAX_PATTERN}} is not served; merge the adapter "
                "into its base model (merge_and_unload)"
            )
    base = given.get("base_model_name_or_path")
    return AdapterConfig(
        rank=given["r"],
        alpha=given["lora_alpha"],
        alpha_pattern=_patterns(file, "alpha_pattern", given),
        rank_pattern=_patterns(file, "rank_pattern", given),
        has_stable_rank=bool(given.get("use_rslora")),
        has_magnitudes=bool(given.get("use_dora")),
        base=base if isinstance(base, str) else "",
    )


def _patterns(file: Path, key: str, given: Mapping[str, Any]) -> Patterns:
    """Return the regular expressions of a setting, which match the ends of names as peft's `get_pattern_key` does."""
    values: Mapping[str, float] = given.get(key) or {}
    if len(values) > _MAX_PATTERNS:
        raise UnsupportedCheckpoint(f"{file}: {key} has {len(values)} keys; the limit is {_MAX_PATTERNS}")
    for pattern in values:
        if len(pattern) > _MAX_PATTERN or pattern.count(".*") > 2 or not _PATTERN.fullmatch(pattern):
            raise UnsupportedCheckpoint(
                f"{file}: {key} has the key {pattern[:_MAX_PATTERN]!r}; it must have at most {_MAX_PATTERN} "
                "characters, which are letters, digits, _, -, ., \\., ^, $ and |, and .* at most twice. Name the "
                "layers instead"
            )
    return tuple((re.compile(rf"(.*\.)?({pattern})"), value) for pattern, value in values.items())


def _matching(patterns: Patterns, layer: str, default: float) -> float:
    """Return the value of the first regular expression that matches a name."""
    return next((value for pattern, value in patterns if pattern.fullmatch(layer)), default)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_RANK


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_ALPHA


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_pattern(value: Any, fits: Callable[[Any], bool]) -> bool:
    return value is None or (isinstance(value, dict) and all(map(fits, value.values())))


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("peft_type", lambda value: value == "LORA", "is not served; only LORA is"),
    ("fan_in_fan_out", lambda value: not value, "is not served, because it means transposed weights"),
    (
        "init_lora_weights",
        lambda value: isinstance(value, bool | str | None) and value in _PLAIN_STARTS,
        (
            "means that training has changed the weights of the base model. Save the adapter with peft's "
            "path_initial_model_for_weight_conversion, or merge it (merge_and_unload)"
        ),
    ),
    ("bias", lambda value: value in (None, *_BIASES), f"must be one of {', '.join(_BIASES)}"),
    *((key, _is_switch, "must be true or false") for key in ("use_rslora", "use_dora", "lora_bias")),
    ("r", _is_rank, f"must be an integer from 1 to {_MAX_RANK}"),
    ("lora_alpha", _is_number, f"must be a number from -{_MAX_ALPHA:g} to {_MAX_ALPHA:g}"),
    ("rank_pattern", partial(_is_pattern, fits=_is_rank), f"must map names of layers to ranks up to {_MAX_RANK}"),
    (
        "alpha_pattern",
        partial(_is_pattern, fits=_is_number),
        f"must map names of layers to numbers from -{_MAX_ALPHA:g} to {_MAX_ALPHA:g}",
    ),
)
"""Keys, checks of their values, and the rest of the message if a value fails its check."""
