"""Detection of quantized checkpoints, and checks that this installation can run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint

_DESCRIPTION = "quant_model_description"
_TEXT_MODELS = ("text_config", "language_config", "llm_config")
_INSTEAD = "Alternatively, use the unquantized checkpoint, or one in a format that docs/families.md lists"


def quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the quantization settings in the form of transformers' `quantization_config`, or None if there are none.

    Older tools store the settings in other places: compressed-tensors in `compression_config`, AutoGPTQ in
    quantize_config.json, AutoAWQ in quant_config.json, and NVIDIA's ModelOpt in hf_quant_config.json. ModelSlim
    describes each weight in quant_model_description.json, which is the entry `description` of the result.

    Raises:
        UnsupportedCheckpoint: config.json names a quantization of MindIE, but there is no description of the weights.

    """
    config = checkpoint.config
    if name := description_file(checkpoint):
        return {"quant_method": "modelslim", "description": checkpoint.json(name)}
    if (stated := config.get("quantize")) not in (None, "", "float"):
        raise UnsupportedCheckpoint(
            f"{checkpoint.path}: quantize is {stated!r} in config.json, but there is no quant_model_description.json, "
            "which ModelSlim writes beside the weights. Copy the file from the quantized checkpoint, or remove the key "
            "quantize if the weights are not quantized"
        )
    for holder in (config, *(config.get(name) for name in _TEXT_MODELS)):
        for key in ("quantization_config", "compression_config"):
            method = holder.get(key) if isinstance(holder, Mapping) else None
            if isinstance(method, dict) and method and not _is_off(method):
                return method
    if settings := checkpoint.json("quantize_config.json"):
        return {"quant_method": "gptq", **settings}
    if settings := checkpoint.json("quant_config.json"):
        renamed = {"w_bit": "bits", "q_group_size": "group_size"}
        return {"quant_method": "awq", **{renamed.get(name, name): value for name, value in settings.items()}}
    if checkpoint.json("hf_quant_config.json"):
        return {"quant_method": "modelopt"}
    return None


def description_file(checkpoint: Checkpoint) -> str | None:
    """Return the name of ModelSlim's description of the weights, or None if the checkpoint does not have it.

    Older releases append the type of the weights to the name, as in quant_model_description_w8a8.json.

    Raises:
        UnsupportedCheckpoint: There are several descriptions.

    """
    names = sorted(file.name for file in checkpoint.path.glob(f"{_DESCRIPTION}*.json"))
    if f"{_DESCRIPTION}.json" in names:
        return f"{_DESCRIPTION}.json"
    if len(names) > 1:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has {len(names)} descriptions of quantized weights: {', '.join(names)}. Keep only the "
            "description that belongs to the weights"
        )
    return names[0] if names else None


def _is_off(settings: Mapping[str, Any]) -> bool:
    """Return whether these are bitsandbytes settings that enable neither 4-bit nor 8-bit weights."""
    return settings.get("quant_method") == "bitsandbytes" and method_of(settings) == "bitsandbytes"


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint declares its weights as quantized."""
    return quantization(checkpoint) is not None


def method_of(settings: Mapping[str, Any]) -> str:
    """Return transformers' name for the quantization method. The names for bitsandbytes also contain the bits."""
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}") or settings.get(f"_load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    return str(settings.get("quant_method"))


def check_quantization(checkpoint: Checkpoint, device: Device) -> None:
    """Check that quantized weights can run on `device`.

    Raises:
        UnsupportedCheckpoint: A package or an operator is missing, or transformers does not support the method.
            transformers would load packed weights of an unknown method as if they were not quantized.

    """
    if (settings := quantization(checkpoint)) is None:
        return
    check_method(checkpoint)
    from transformers.quantizers.auto import AutoHfQuantizer  # imported late, like all of transformers' modeling code

    method = method_of(settings)
    refused = f"{checkpoint.path} is quantized with {method!r}, which cannot run here"
    try:
        quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device.torch_device}, weights_only=True)
    except (ImportError, RuntimeError, ValueError, TypeError) as error:
        raise UnsupportedCheckpoint(f"{refused}: {error}. {_INSTEAD}") from error


def check_method(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedCheckpoint if transformers does not support the quantization method."""
    if (settings := quantization(checkpoint)) is None:
        return
    # Imported late, as above. This module does not import torch, which `mindie-mm doctor` avoids.
    from transformers.utils.quantization_config import QuantizationMethod

    method, known = method_of(settings), [one.value for one in QuantizationMethod]
    if method not in known:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} is quantized with {method!r}, which transformers does not support; it supports "
            f"{', '.join(sorted(known))}. {_INSTEAD}"
        )


def try_layers(checkpoint: Checkpoint, module: nn.Module, device: Device, dtype: torch.dtype) -> None:
    """Run each kind of layer in `module` on one row.

    This test is needed because an installed package may lack an operator for this device or dtype.

    Raises:
        UnsupportedCheckpoint: A layer cannot run. The message names the layer.

    """
    tried = set()
    for name, layer in module.named_modules():
        kind = (type(layer), getattr(layer, "in_features", None))
        if not isinstance(kind[1], int) or kind in tried:
            continue
        tried.add(kind)
        try:
            with torch.no_grad():  # not inference_mode: a layer may rearrange its weight when it is first called
                layer(torch.zeros(1, kind[1], dtype=dtype, device=device.torch_device))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ImportError, NotImplementedError, AssertionError, ValueError) as error:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path} is quantized with {method_of(quantization(checkpoint) or {})!r}, which the "
                f"device {device.name} cannot run in {str(dtype).removeprefix('torch.')} ({name}): {error}. "
                f"Use another --dtype or --device. {_INSTEAD}"
            ) from error


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedCheckpoint if only transformers' layers can run the quantization method."""
    if (settings := quantization(checkpoint)) is None:
        return
    raise UnsupportedCheckpoint(
        f"{checkpoint.path} is quantized with {method_of(settings)!r}, which only transformers' layers support; this "
        f"family implements its own layers. {_INSTEAD}"
    )
