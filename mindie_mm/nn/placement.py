"""The vision tower and the projector on a device, or in a precision, of their own.

Hooks bring what a part is called with to the part, and what it gives back to its caller: no family knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device import open_device
from mindie_mm.errors import InputError
from mindie_mm.nn.model import MediaModel

# What transformers' own modules, and those here, call these parts.
VISION = (
    "vision",
    "vision_tower",
    "visual",
    "vision_model",
    "vision_encoder",
    "image_tower",
    "vision_backbone",
    "high_res_vision_model",
    "high_res_vision_neck",
    "high_res_vision_proj",
)
PROJECTOR = ("multi_modal_projector", "merger", "connector", "aligner", "language_projection", "projector", "attn_pool")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a part runs, and in what precision."""

    device: str | None = None
    """As `open_device` takes it; None: where the rest runs."""
    bits: int | None = None
    """32 or 16; None: as the rest."""

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """The part's dtype in a model of dtype `model`."""
        if self.bits is None or self.bits == model.itemsize * 8:
            return model
        return torch.float32 if self.bits == 32 else torch.bfloat16


TOGETHER = Placement()
"""With the rest of the model."""


def place(model: MediaModel, vision: Placement, projector: Placement) -> None:
    """Moves the tower and the projector of `model`.

    Weights and pixels are rounded to the model's dtype before; what counts in 32 bits is the arithmetic.
    InputError where it has no such part, or a quantised one; DeviceError where the device is not there.
    """
    # The projector after the tower, which it may lie in.
    for what, names, placement in (("vision", VISION, vision), ("projector", PROJECTOR, projector)):
        if placement == TOGETHER:
            continue
        if not (parts := list(_parts(model, names))):
            raise InputError(f"{what}_device or {what}_bits is given, but this model has no part of that kind to move")
        device = open_device(placement.device).torch_device if placement.device else model.spec.device
        for part in parts:
            _move(part, what, device, placement.dtype(model.spec.dtype))


def _parts(model: MediaModel, names: tuple[str, ...]) -> Iterator[nn.Module]:
    """The outermost modules of these names."""
    roots = [value for value in vars(model).values() if isinstance(value, nn.Module)]
    seen: set[nn.Module] = set()
    for root in roots:
        inside: set[nn.Module] = set()
        for path, module in root.named_modules():
            if module in seen or module in inside:
                continue
            if path.rpartition(".")[2] in names:
                inside.update(module.modules())
                yield module
        seen.update(root.modules())


def _move(part: nn.Module, what: str, device: torch.device, dtype: torch.dtype) -> None:
    first = next(part.parameters())
    outer = (first.device, first.dtype)
    if any(not tensor.is_floating_point() for tensor in part.parameters()):
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
