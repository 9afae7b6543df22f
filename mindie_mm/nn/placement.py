"""Placement of the vision tower and the projector on another device or in another precision.

Hooks move the inputs of a part to the part's device, and its outputs back to the rest of the model. A family only
declares the names of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device import QuantizedLinear, kind_of, open_device
from mindie_mm.errors import InputError
from mindie_mm.nn.model import MediaModel


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and precision of the tower or the projector."""

    device: str | None = None
    """Name of the device for `open_device`. None means the device of the rest of the model."""
    bits: int | None = None
    """Bits per weight and activation, 32 or 16. None means the precision of the rest of the model."""

    def dtype(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype for a part whose weights were loaded as `own`."""
        if self.bits is None or self.bits == own.itemsize * 8:
            return own
        return torch.float32 if self.bits == 32 else torch.bfloat16


TOGETHER = Placement()
"""The placement of a part that stays with the rest of the model."""


def place(model: MediaModel, vision: Placement, projector: Placement) -> None:
    """Move the tower and the projector of `model`.

    Weights and pixels have already been rounded to the model's dtype, so 32 bits only make the arithmetic more
    precise.

    Args:
        model: The loaded model.
        vision: Placement of the tower.
        projector: Placement of the projector.

    Raises:
        InputError: The model has no such part, or the part is quantized.
        DeviceError: The device is not available.

    """
    moves: list[tuple[nn.Module, torch.device, torch.dtype]] = []
    # The projector moves last, because it may be inside the tower.
    for what, names, placement in (
        ("vision", model.traits.vision_parts, vision),
        ("projector", model.traits.projector_parts, projector),
    ):
        if placement != TOGETHER and not names:
            raise InputError(
                f"{what}_device or {what}_bits is set, but this model has no such part; leave the setting out"
            )
        device = open_device(placement.device).torch_device if placement.device else model.spec.device
        for part in parts(model, names):
            if _is_quantized(part):
                if placement != TOGETHER:
                    raise InputError(
                        f"{what}_device or {what}_bits is set, but this part is quantized and cannot be moved; leave "
                        "the setting out"
                    )
                continue
            own = next(part.parameters()).dtype
            dtype = kind_of(device).tower_dtype(own) if placement.bits is None else placement.dtype(own)
            if placement != TOGETHER or dtype != own:
                moves.append((part, device, dtype))
    for move in moves:
        _move(*move)


def devices_of(model: MediaModel) -> set[torch.device]:
    """Return all devices on which `model` computes. Its towers may run on a device other than its decoder's."""
    return {model.spec.device, *(parameter.device for parameter in model.module.parameters())}


def parts(model: MediaModel, names: Iterable[str]) -> Iterator[nn.Module]:
    """Yield the modules with these names. For a ModuleList, yield the modules in it."""
    for name in names:
        part = model.module.get_submodule(name)
        yield from part if isinstance(part, nn.ModuleList) else (part,)


def _move(part: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    first = next(part.parameters())
    outer = (first.device, first.dtype)
    stored = part.state_dict().keys()
    # Computed buffers, such as rotary frequencies, keep their dtype. transformers always computes them in float32.
    buffers = {name: buffer for name, buffer in part.named_buffers() if name not in stored}
    part.to(device, dtype)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(part.get_submodule(owner), leaf, buffer.to(device))

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        args, kwargs = _mapped((args, kwargs), lambda tensor: _brought(tensor, device, dtype))
        return args, kwargs

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return _mapped(output, lambda tensor: _brought(tensor, *outer))

    part.register_forward_pre_hook(enter, with_kwargs=True)
    part.register_forward_hook(leave)


def _is_quantized(part: nn.Module) -> bool:
    return any(not tensor.is_floating_point() for tensor in part.parameters()) or any(
        isinstance(layer, QuantizedLinear) for layer in part.modules()
    )


def _brought(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the tensors in `value`, which may be nested in any containers that transformers uses."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: _mapped(entry, change) for key, entry in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(entry, change) for entry in value)
    return value
