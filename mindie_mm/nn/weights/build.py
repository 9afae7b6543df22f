"""Strict loading of a checkpoint's weights into modules that are not from transformers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn import experts
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.renaming import RenamedWeights, rename
from mindie_mm.nn.weights.formats import Format, PackedWeight, format_of, packed_weights, read_packed
from mindie_mm.nn.weights.loading import counted
from mindie_mm.nn.weights.placing import Placing, dequantized
from mindie_mm.nn.weights.pretrained import check_shapes, check_weights, read_config
from mindie_mm.nn.weights.quantized import check_method, is_quantized, refuse_quantized
from mindie_mm.nn.weights.shards import weight_files
from mindie_mm.nn.weights.shares import refuse_shares
from mindie_mm.nn.weights.stored_tensors import check_stored, read_weights, require_floats

M = TypeVar("M", bound=nn.Module)


def build(
    make: Callable[[], M], checkpoint: Checkpoint, device: Device, dtype: torch.dtype, *, unused: Sequence[str] = ()
) -> M:
    """Make a module for inference and load the checkpoint's weights into it.

    Linear layers with packed weights (`formats/`) stay quantized. All other quantized weights are dequantized.

    Args:
        make: Function that makes the module. It is called on the meta device.
        checkpoint: Where the weights are.
        device: Where the module runs.
        dtype: The dtype of weights that are not quantized.
        unused: Patterns (fnmatch) for names of weights that the checkpoint may have in addition to the module's own.

    Raises:
        UnsupportedCheckpoint: A weight is missing, unknown or of the wrong shape, or the quantization method is not
            supported.

    """
    packing = format_of(checkpoint)
    if packing is None:
        refuse_quantized(checkpoint)
    refuse_shares(checkpoint)
    with torch.device("meta"):
        module = make()
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    placing = Placing(device, packing)
    tensors: dict[str, Tensor] = {}
    unexpected: list[str] = []
    misfits: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for name, weight in counted(_read(checkpoint, packing), len(expected)):
        if placing.take(name, weight, module):
            continue
        for part, tensor in _plain(checkpoint, name, weight, expected):
            if part not in expected:
                unexpected.append(part)
            elif tuple(tensor.shape) != expected[part]:
                misfits.append((part, tuple(tensor.shape), expected[part]))
            else:
                tensors[part] = tensor.to(device.torch_device, dtype)
    placing.empty(module)
    check_shapes(checkpoint, misfits + placing.misfits)
    check_weights(checkpoint, sorted(module.state_dict().keys() - tensors.keys()), unexpected, unused)
    module.load_state_dict(tensors, assign=True)
    tensors.clear()
    placing.finish(module, dtype)
    module.requires_grad_(False).eval()
    experts.arrange(module)
    return module


def renamed_weights(cls: type[Any], checkpoint: Checkpoint) -> RenamedWeights | None:
    """Return the weights of a translated checkpoint under their names in `cls`, a PreTrainedModel.

    The tensors are views of the files, on the CPU. Return None if transformers itself reads the published names.

    Raises:
        UnsupportedCheckpoint: The shape of a weight contradicts config.json, or the weights are quantized.

    """
    if not checkpoint.renamings:
        return None
    _refuse_quantized_originals(checkpoint)
    config = read_config(cls.config_class.__name__, checkpoint)
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in cls(config).state_dict().items()}
    renamed = rename(read_weights(checkpoint), shapes, checkpoint.renamings)
    check_shapes(checkpoint, renamed.misfits)
    return renamed


def check_weight_files(checkpoint: Checkpoint, *, own_layers: bool) -> None:
    """Check how the weights are stored, without reading the weights. The check does not depend on the device.

    Args:
        checkpoint: Where the weights are. A checkpoint in its authors' layout must already be translated.
        own_layers: Whether the model's layers are implemented here instead of in transformers.

    Raises:
        UnsupportedCheckpoint: A file is missing or damaged, or no device can run the quantization.

    """
    weight_files(checkpoint)
    if is_quantized(checkpoint):
        check_quantized(checkpoint, own_layers=own_layers)
        if not checkpoint.renamings and (packing := format_of(checkpoint)) is not None:
            packed_weights(checkpoint, packing)
    else:
        check_stored(checkpoint)


def check_quantized(checkpoint: Checkpoint, *, own_layers: bool) -> None:
    """Check from the settings of a checkpoint whether any device can run its quantization.

    `check_weight_files` describes the arguments and errors.
    """
    if checkpoint.renamings:
        _refuse_quantized_originals(checkpoint)
    elif format_of(checkpoint) is None:
        if own_layers:
            refuse_quantized(checkpoint)
        else:
            check_method(checkpoint)


def _refuse_quantized_originals(checkpoint: Checkpoint) -> None:
    if is_quantized(checkpoint):
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} is quantized, and its weights have the names of the original layout; quantized "
            "weights are supported only in transformers' layout"
        )


def _read(checkpoint: Checkpoint, packing: Format | None) -> Iterator[tuple[str, Tensor | PackedWeight]]:
    """Yield the name and value of each weight. Packed weights stay packed."""
    yield from read_weights(checkpoint) if packing is None else read_packed(checkpoint, packing)


def _plain(
    checkpoint: Checkpoint, name: str, weight: Tensor | PackedWeight, expected: Container[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight as plain tensors, by name. Layers such as nn.MultiheadAttention cannot use packed weights."""
    if isinstance(weight, Tensor):
        require_floats(checkpoint, name, weight.dtype)
        yield name, weight
        return
    yield from dequantized(name, weight, expected)
