"""Checkpoints whose weights are quantised: transformers loads them, or what is missing is said by name."""

from __future__ import annotations

from typing import Any

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint import Checkpoint


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether config.json says that the weights are."""
    return _settings(checkpoint) is not None


def check_quantization(checkpoint: Checkpoint, device: Device) -> None:
    """UnsupportedCheckpoint names the package or device that is missing for weights that are quantised.

    Also for a method that transformers does not know: it would take the packed weights for plain ones.
    """
    if (settings := _settings(checkpoint)) is None:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer  # late, like all of its modelling

    method = _method(settings)
    if method not in AUTO_QUANTIZER_MAPPING:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} is quantised with {method!r}, which transformers does not load; it loads "
            f"{', '.join(sorted(AUTO_QUANTIZER_MAPPING))}"
        )
    try:
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
        quantizer.validate_environment(device_map={"": device.torch_device}, weights_only=True)
    except (ImportError, RuntimeError, ValueError, TypeError) as error:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} is quantised with {method!r}, which cannot be run here: {error}"
        ) from error


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """UnsupportedCheckpoint for a quantised checkpoint of a family whose layers are not transformers' own."""
    if (settings := _settings(checkpoint)) is not None:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} is quantised with {_method(settings)!r}; of this family, whose layers are not "
            "transformers' own, only plain weights are served"
        )


def _settings(checkpoint: Checkpoint) -> dict[str, Any] | None:
    config = checkpoint.config
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found if isinstance(found, dict) else None


def _method(settings: dict[str, Any]) -> str:
    """transformers' name for it: bitsandbytes has two, by its bits."""
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    return str(settings.get("quant_method"))
