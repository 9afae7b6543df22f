"""Default sampling settings of a checkpoint, from its generation_config.json."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import ids_of

_log = logging.getLogger(__name__)

FILE = "generation_config.json"
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of `SamplingParams` by the keys of generation_config.json that set them."""
_NEUTRAL = {name: getattr(SamplingParams(), name) for name in _FIELDS.values()}


def default_sampling(checkpoint: Checkpoint, source: str = "auto") -> SamplingParams:
    """Return the default sampling settings of requests.

    The keys are the same as in vLLM's `ModelConfig.get_diff_sampling_param`, which ignores `do_sample`.

    Args:
        checkpoint: Checkpoint to serve.
        source: "auto" for the checkpoint's generation_config.json, "vllm" for neutral settings, or the path of a folder
            with a generation_config.json.

    Raises:
        UnsupportedCheckpoint: A value in the checkpoint's file is invalid.
        InputError: The folder has no generation_config.json, or a value in this file is invalid.

    """
    if source == "vllm":
        return SamplingParams()
    if source == "auto":
        config = checkpoint.json(FILE)
        try:
            return _params(config, checkpoint.path)
        except InputError as error:
            raise UnsupportedCheckpoint(
                f"{error}. Correct the file, or use other defaults with --generation-config vllm"
            ) from error
    return _params(_file_in(source), Path(source))


def defaults_of(model: str | Path | None, family_name: str | None, source: str) -> SamplingParams:
    """Return the default sampling settings for a checkpoint directory.

    This function raises the same errors as `default_sampling` and `family_of`.
    """
    from mindie_mm.models import family_of, reading  # imports torch, which the service process does not need

    checkpoint = Checkpoint.open(model)
    if source == "auto":
        family = family_of(checkpoint, family_name)
        with reading(checkpoint, family):
            checkpoint = family.translated(checkpoint)
    return default_sampling(checkpoint, source)


def stated_end_tokens(source: str) -> tuple[int, ...] | None:
    """Return the end-of-sequence ids in a folder's generation_config.json. vLLM also reads these ids.

    Return None if `source` is "auto" or "vllm", or if the file has no such ids. In this case the checkpoint's own ids
    apply.

    Raises:
        InputError: The folder has no generation_config.json, or an id is not an integer.

    """
    if source in ("auto", "vllm") or (value := _file_in(source).get("eos_token_id")) is None:
        return None
    return ids_of(value, Path(source) / FILE)


def _file_in(source: str) -> dict[str, Any]:
    folder = Path(source)
    if not (folder / FILE).is_file():
        raise InputError(
            f"generation_config={source!r} must be auto, vllm or a folder with a {FILE}",
            param="generation_config",
        )
    return Checkpoint(folder, {}).json(FILE)


def effective(params: SamplingParams) -> dict[str, float]:
    """Return the settings that a generation_config.json can set and that differ from their neutral values."""
    return {name: value for name in _FIELDS.values() if (value := getattr(params, name)) != _NEUTRAL[name]}


def log_default_sampling(params: SamplingParams, source: str) -> None:
    """Log the default sampling settings in one line."""
    stated = [f"{name} {value}" for name, value in effective(params).items()]
    _log.info("default sampling parameters: %s (--generation-config %s)", ", ".join(stated) or "neutral", source)


def _params(config: Mapping[str, Any], folder: Path) -> SamplingParams:
    """Return the settings in a folder's file. Raise InputError if a value is invalid."""
    given = {name: config[key] for key, name in _FIELDS.items() if config.get(key) is not None}
    if given.get("top_k") == -1:  # vLLM's value for "all tokens"
        given["top_k"] = 0
    try:
        return SamplingParams(**given, cut_max_tokens="max_tokens" in given).check(math.inf)
    except InputError as error:
        raise InputError(f"{folder / FILE}: {error}") from error
