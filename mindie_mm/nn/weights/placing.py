"""Packed weights in modules: which layers hold them, and the layers that replace plain ones.

transformers never sees the packed weights of its models. While it loads the plain weights, the layers of packed weights
have no weights at all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device import Device, QuantizedLinear, kernels_of
from mindie_mm.nn import experts
from mindie_mm.nn.weights.formats import Format, PackedWeight
from mindie_mm.nn.weights.formats.packed import IntegerWeight

_log = logging.getLogger(__name__)
_PROJECTIONS = ("gate", "up", "down")
_FIRST = ("gate_up", "gate", "up")
_EXPERT = re.compile(r".+\.experts\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
_ALL_EXPERTS = re.compile(r".+\.experts\.(?P<projection>gate_up|down)_proj")


class Placing:
    """Packed weights that wait for the layers of one model."""

    def __init__(self, device: Device, packing: Format | None) -> None:
        """Start without weights. `packing` is their format, or None if all weights are plain."""
        self._device = device
        self._adds_biases = packing is not None and packing.adds_biases
        self._weights: dict[str, PackedWeight] = {}
        self._biases: dict[str, Tensor] = {}
        self._experts: dict[str, dict[tuple[str, int], PackedWeight]] = {}
        """The weight of each projection of each expert, by the path of the experts in the model."""
        self._published: dict[str, dict[str, PackedWeight]] = {}
        """The same weights by their published names, until `incomplete_experts`."""
        self._num_dequantized = 0
        self.misfits: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        """Name of each weight of the wrong shape, its shape, and the shape that the model needs."""

    def take(self, name: str, weight: Tensor | PackedWeight, model: nn.Module) -> bool:
        """Keep a weight that does not become a plain weight of `model`. Return whether it was kept.

        Args:
            name: Name of the weight in the model.
            weight: Its value.
            model: The model, on the meta device.

        """
        path, _, part = name.rpartition(".")
        layer = _submodule(model, path)
        if isinstance(weight, Tensor):
            return self._adds_biases and part == "bias" and self._take_bias(path, layer, weight)
        if part != "weight" or type(layer) is not nn.Linear:
            return False
        if not weight.stays_packed(self._device):
            self._num_dequantized += 1
            return False
        if weight.shape != (needed := tuple(layer.weight.shape)):
            self.misfits.append((name, weight.shape, needed))
        self._weights[path] = weight
        return True

    def take_experts(self, own: str, name: str, weight: Tensor | PackedWeight, model: nn.Module) -> bool:
        """Keep a published weight of one or of all experts, if the device multiplies by it. Return whether it is kept.

        Args:
            own: Name of the joined weights of the experts in the model.
            name: Published name of the weight.
            weight: Its value.
            model: The model, on the meta device.

        """
        path, _, part = own.rpartition(".")
        layer: Any = _submodule(model, path)
        if isinstance(weight, Tensor) or not experts.can_replace(layer):
            return False
        if match := _EXPERT.fullmatch(name):
            found = {(match["projection"], int(match["expert"])): weight}
        elif (match := _ALL_EXPERTS.fullmatch(name)) and name.endswith(part):
            is_transposed = layer.is_transposed == (weight.shape == getattr(layer, part).shape)
            own_weights = weight.of_experts(is_transposed)
            found = {(match["projection"], number): one for number, one in enumerate(own_weights)}
        else:
            return False
        if not found or not all(map(self._multiplies, found.values())):
            return False
        self._experts.setdefault(path, {}).update(found)
        self._published.setdefault(path, {})[name] = weight
        return True

    def _multiplies(self, weight: PackedWeight) -> bool:
        """Return whether experts on the device can have this weight."""
        kernels = kernels_of(self._device.torch_device)
        if not kernels.joins_experts:
            return weight.stays_packed(self._device)
        if not kernels.rounds_experts or not isinstance(weight, IntegerWeight):
            return False
        return weight.quantized.rounds_input and weight.quantized.static_input is None

    def incomplete_experts(self, model: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
        """Yield the kept weights of layers whose kept weights are not exactly those of `model`, and forget them."""
        for path, published in self._published.items():
            shapes = {key: weight.shape for key, weight in self._experts[path].items()}
            if shapes not in _shapes(model.get_submodule(path)):
                del self._experts[path]
                yield from published.items()
        self._published.clear()

    def _take_bias(self, path: str, layer: Any, bias: Tensor) -> bool:
        """Keep a bias that the unquantized layer does not have.

        Return whether it can be added to the layer. A bias of zeros is dropped, which counts as added.
        """
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or getattr(layer, "bias", None) is not None:
            return False
        if weight.shape[:1] != bias.shape:
            return False
        if bias.any():
            self._biases[path] = bias
        return not bias.any() or type(layer) is nn.Linear or weight.ndim == 1

    def drops(self, bias: Tensor | PackedWeight) -> bool:
        """Return whether a bias that the model does not have changes nothing, because the format writes zeros."""
        return self._adds_biases and isinstance(bias, Tensor) and not bias.any()

    def empty(self, model: nn.Module) -> None:
        """Remove the plain weights of the layers that will be replaced."""
        for path, weight in self._weights.items():
            layer: Any = model.get_submodule(path)
            layer.weight = None
            if weight.has_bias:
                layer.bias = None
            # transformers must not initialize the missing weight, neither by itself nor through the parent module.
            parent: Any = model.get_submodule(path.rpartition(".")[0])
            layer._is_hf_initialized = True  # noqa: SLF001
            if not [*parent.buffers(recurse=False)]:
                parent._is_hf_initialized = True  # noqa: SLF001
        for path in self._experts:
            layer = model.get_submodule(path)
            layer.gate_up_proj = layer.down_proj = None
            layer._is_hf_initialized = True  # noqa: SLF001

    def finish(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Replace the layers of `model`, whose plain weights are loaded."""
        for path, bias in self._biases.items():
            layer, added = model.get_submodule(path), bias.to(self._device.torch_device, dtype)
            if isinstance(layer, nn.Linear):
                layer.bias = nn.Parameter(added, requires_grad=False)
            else:
                layer.register_buffer("bias", added, persistent=False)
                layer.register_forward_hook(_add_bias)
        layers: list[Any] = []
        while self._experts:
            layers += self._finish_experts(*self._experts.popitem(), model, dtype)
        while self._weights:
            path, weight = self._weights.popitem()
            plain: Any = model.get_submodule(path)
            layers.append(weight.layer(plain.bias, self._device))
            model.set_submodule(path, layers[-1])
        if self._num_dequantized:
            _log.warning(
                "the quantized weights of %d linear layers are dequantized, because the device %s cannot multiply by "
                "them; they take as much memory as unquantized weights",
                self._num_dequantized,
                self._device.name,
            )
        if layers:
            _log.info(
                "%d linear layers have quantized weights, %.1f MiB; %d of them round their input to 8 bits",
                len(layers),
                sum(layer.values.nbytes + layer.scales.nbytes for layer in layers) / 2**20,
                sum(layer.rounds_input for layer in layers),
            )

    def _finish_experts(
        self, path: str, found: dict[tuple[str, int], PackedWeight], model: nn.Module, dtype: torch.dtype
    ) -> list[nn.Module]:
        """Give a layer of `model` its experts. Return those of their linear layers that do not share tensors."""
        part, device = model.get_submodule(path), self._device.torch_device
        numbers = range(1 + max(number for _, number in found))
        if not kernels_of(device).joins_experts:
            layers = {key: found.pop(key).layer(None, self._device) for key in [*found]}
            firsts = ([layers[name, n] for name in _FIRST if (name, n) in layers] for n in numbers)
            pairs = [(first, layers["down", n]) for n, first in zip(numbers, firsts, strict=True)]
            experts.replace_layers(part, pairs, device, dtype)
            return [layer for layer in part.modules() if isinstance(layer, QuantizedLinear)]
        own = {key: weight.quantized for key, weight in found.items() if isinstance(weight, IntegerWeight)}
        weights = {name: [own[name, number] for number in numbers] for name in _PROJECTIONS}
        values = {name: torch.stack([one.values for one in own]) for name, own in weights.items()}
        scales = {name: torch.stack([one.scales[:, 0] for one in own]) for name, own in weights.items()}
        first, second = torch.cat([values["gate"], values["up"]], 1), values["down"]
        parts = first, second, torch.cat([scales["gate"], scales["up"]], 1), scales["down"]
        first, second, *both = (one.to(device) for one in parts)
        experts.replace_rounding(part, first, second, (both[0], both[1]), dtype)
        return []


def _add_bias(norm: Any, _: Any, normed: Tensor) -> Tensor:
    shifted: Tensor = normed + norm.bias
    return shifted


def _shapes(layer: Any) -> Iterator[dict[tuple[str, int], tuple[int, ...]]]:
    """Yield the shapes of the projections of each expert of a transformers layer, separate and joined."""
    count, width, inner = layer.down_proj.shape
    if layer.is_transposed:
        width, inner = inner, width
    separate = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    joined = {"gate_up": (2 * inner, width), "down": (width, inner)}
    for shapes in (separate, joined):
        yield {(name, expert): shape for name, shape in shapes.items() for expert in range(count)}


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def dequantized(name: str, weight: PackedWeight, expected: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a dequantized weight, and its bias unless it is zero and not `expected`, with their names."""
    yield name, weight.dequantized()
    bias, bias_name = weight.dequantized_bias(), f"{name.removesuffix('weight')}bias"
    if bias is not None and (bias_name in expected or bias.any()):
        yield bias_name, bias


def with_packed(
    cls: type[Any],
    config: Any,
    weights: Iterable[tuple[str, Tensor | PackedWeight]],
    placing: Placing,
    dtype: torch.dtype,
) -> tuple[type[Any], dict[str, Tensor]]:
    """Return a class whose `from_pretrained` leaves out packed weights, and its argument `state_dict`.

    Packed weights that transformers would convert are dequantized, except those of experts that the device multiplies.

    Args:
        cls: The PreTrainedModel to load.
        config: Its configuration.
        weights: Published names and values.
        placing: Gets the packed weights.
        dtype: The dtype of dequantized weights.

    """
    with torch.device("meta"):
        model = cls(config)
    name_in, stored = _renaming(model), model.state_dict()
    plain: dict[str, Tensor] = {}
    for name, weight in weights:
        own, is_converted = name_in(name)
        if placing.take_experts(own, name, weight, model):
            continue
        if name.endswith(".bias") and own not in stored and placing.drops(weight):
            continue
        if not is_converted and placing.take(own, weight, model):
            continue
        if isinstance(weight, Tensor):
            plain[name] = weight
            continue
        bias = f"{name.removesuffix('weight')}bias"
        expected = (bias,) if name_in(bias)[0] in stored else ()
        plain |= {part: tensor.to(dtype) for part, tensor in dequantized(name, weight, expected)}
    for name, weight in placing.incomplete_experts(model):
        plain[name] = weight.dequantized().to(dtype)

    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        placing.empty(self)

    return type(cls.__name__, (cls,), {"__init__": make, "__module__": cls.__module__}), plain


def _renaming(model: Any) -> Callable[[str], tuple[str, bool]]:
    """Return a function from the published name of a weight to its name in `model`, a PreTrainedModel.

    The function also returns whether transformers converts the weight, or ties it to another weight.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # late: the import takes seconds
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model, None, None)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    prefix, stored = model.base_model_prefix, model.state_dict()

    def name_in(name: str) -> tuple[str, bool]:
        own, converted = rename_source_key(name, renamings, converters, prefix, stored)
        if own not in stored and name in stored:
            own, converted = rename_source_key(name, [], [], prefix, stored)
        return own, converted is not None or own in model.all_tied_weights_keys

    return name_in
