"""The vision tower and the projector on a device, or in a precision, of their own.

Hooks bring what a part is called with to the part, and what it gives back to its caller: a family only names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device import open_device
from mindie_mm.errors import InputError
from mindie_mm.nn.model import MediaModel


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a part runs, and in what precision."""

    device: str | None = None
    """As `open_device` takes it; None: where the rest runs."""
    bits: int | None = None
    """32 or 16; None: as the rest."""

    def dtype(self, own: torch.dtype) -> torch.dtype:
        """What the dtype of a part becomes that has been loaded as `own`."""
        if self.bits is None or self.bits == own.itemsize * 8:
            return own
        return torch.float32 if self.bits == 32 else torch.bfloat16


TOGETHER = Placement()
"""A part that runs with the rest of the model."""


def place(model: MediaModel, vision: Placement, projector: Placement) -> None:
    """Moves the tower and the projector of `model`.

    Weights and pixels are rounded to the model's dtype before; what counts in 32 bits is the arithmetic.
    InputError where it has no such part, or a quantised one; DeviceError where the device is not there.
    """
    moves: list[tuple[nn.Module, str, torch.device, torch.dtype]] = []
    # The projector after the tower, which it may lie in.
    for what, names, placement in (
        ("vision", model.traits.vision_parts, vision),
        ("projector", model.traits.projector_parts, projector),
    ):
        if placement == TOGETHER:
            continue
        if not names:
            raise InputError(f"{what}_device or {what}_bits is given, but this model has no part of that kind to move")
        device = open_device(placement.device).torch_device if placement.device else model.spec.device
        moves += [(part, what, device, placement.dtype(next(part.parameters()).dtype)) for part in parts(model, names)]
    for move in moves:
        _move(*move)


def devices_of(model: MediaModel) -> set[torch.device]:
    """Return the devices on which `model` computes. Its towers may have others than the rest."""
    return {model.spec.device, *(parameter.device for parameter in model.module.parameters())}


def parts(model: MediaModel, names: Iterable[str]) -> Iterator[nn.Module]:
    """The modules of these names, of a ModuleList those in it."""
    for name in names:
        part = model.module.get_submodule(name)
        yield from part if isinstance(part, nn.ModuleList) else (part,)


def _move(part: nn.Module, what: str, device: torch.device, dtype: torch.dtype) -> None:
    first = next(part.parameters())
    outer = (first.device, first.dtype)
    # bitsandbytes may store 4 bits as floats, such as two bytes of them as one bfloat16.
    if any(not tensor.is_floating_point() or hasattr(tensor, "quant_state") for tensor in part.parameters()):
        raise InputError(f"{what}_device or {what}_bits is given, but that part is quantised, and stays as it is")
    stored = part.state_dict().keys()
    # Made, not loaded, such as rotary frequencies: transformers leaves them in 32 bits, whatever the weights are in.
    made = {name: buffer for name, buffer in part.named_buffers() if name not in stored}
    part.to(device, dtype)
    for name, buffer in made.items():
        owner, _, leaf = name.rpartition(".")
        setattr(part.get_submodule(owner), leaf, buffer.to(device))

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        args, kwargs = _mapped((args, kwargs), lambda tensor: _brought(tensor, device, dtype))
        return args, kwargs

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return _mapped(output, lambda tensor: _brought(tensor, *outer))

    part.register_forward_pre_hook(enter, with_kwargs=True)
    part.register_forward_hook(leave)


def _brought(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with its tensors changed, in whatever containers transformers hands them about."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: _mapped(entry, change) for key, entry in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(entry, change) for entry in value)
    return value
