"""Quantization of a text model's linear layers to int8 after loading."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn

from mindie_mm.device import Device
from mindie_mm.errors import InputError
from mindie_mm.nn.model import MediaModel

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of layers that choose experts. A rounding error there would change the experts."""
_MiB = 2**20
_log = logging.getLogger(__name__)


def quantize(model: MediaModel, device: Device) -> None:
    """Replace the linear layers of the text model, including the output layer, by layers with int8 weights.

    Towers and embeddings keep their precision. An output layer that shares its weight with the embeddings gets int8
    weights of its own.

    Raises:
        DeviceError: The device does not support int8.
        InputError: The model has no layer that can be quantized.

    """
    linears = {linear for part in model.text_modules() for linear in _linears(part)}
    if not linears:
        raise InputError(
            f"weights=int8 is not supported: the text model has no linear layer that can be quantized (data type "
            f"{model.spec.dtype}); use --dtype float32 or bfloat16 without tensor parallelism and with a checkpoint "
            "that is not quantized, or leave weights out"
        )
    model.replace({linear: device.int8_linear(linear) for linear in linears})
    _log.info(
        "%d linear layers of the text model have int8 weights: %.1f MiB instead of %.1f MiB",
        len(linears),
        sum(linear.weight.numel() for linear in linears) / _MiB,
        sum(linear.weight.nbytes for linear in linears) / _MiB,
    )


def _linears(part: nn.Module) -> Iterator[nn.Linear]:
    """Yield the layers below `part` that can be replaced.

    Subclasses of nn.Linear and layers with hooks are left out, because they compute more than a product.
    """
    for name, module in part.named_modules():
        if (
            type(module) is nn.Linear
            and module.weight.dtype in (torch.float32, torch.bfloat16)
            and name.rpartition(".")[2] not in _ROUTERS
            and not module._forward_pre_hooks  # noqa: SLF001
            and "forward" not in vars(module)
        ):
            yield module
