"""The layers of a loaded model that LoRA adapters may change, by their names in transformers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mindie_mm.device import QuantizedLinear, is_linear
from mindie_mm.nn.decoder_layer import DecoderLayer
from mindie_mm.nn.split_linear import Split, split_of

_NO_PREFIXES = ("", "model.")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A linear layer or an embedding. A joined layer computes several of them."""

    module: nn.Module
    start: int
    """First output of the layer among the outputs of `module`."""
    stop: int
    num_inputs: int
    """Number of inputs of a linear layer, or of ids of an embedding."""
    is_embedding: bool
    in_text: bool
    """True if the layer belongs to the text model or is the output layer, instead of a tower or projector."""
    split: Split | None
    """Share of this rank in the layer, or None if it has the whole layer. The numbers above are those of the share."""

    @property
    def num_outputs(self) -> int:
        return self.stop - self.start

    @property
    def by_input(self) -> bool:
        """True if the ranks sum their products, so that an adapter changes only a term of the output."""
        return self.split is not None and self.split.by_input

    @property
    def whole(self) -> tuple[int, int]:
        """Number of outputs and inputs of the layer on all ranks."""
        if self.split is None:
            return self.num_outputs, self.num_inputs
        return (self.num_outputs, self.split.size) if self.by_input else (self.split.size, self.num_inputs)

    def share(self, part: str, tensor: Tensor) -> Tensor:
        """Return this rank's share of a tensor of an adapter. `part` is one of those of `Change.of`."""
        if self.split is None or part in (("b", "b_bias", "bias", "magnitude") if self.by_input else ("a",)):
            return tensor
        size = self.num_inputs if self.by_input else self.num_outputs
        return tensor.narrow(1 if self.by_input else 0, self.split.start, size).clone()  # frees the rest

    @property
    def hides_bias(self) -> bool:
        """True if the quantized weight may contain the bias (`StaticInput.has_bias`)."""
        return isinstance(self.module, QuantizedLinear) and self.module.sum_bias is not None

    @property
    def like(self) -> Tensor:
        """A tensor of the layer, which states its device."""
        first: Tensor | None = next(self.module.parameters(), None)
        return next(self.module.buffers()) if first is None else first

    def input_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data type of the layer's input in a model of `dtype`. A tower may have another one."""
        if not isinstance(self.module, QuantizedLinear) and self.like.dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            return self.like.dtype
        return dtype

    @property
    def weight(self) -> Tensor:
        """The weight, [outputs, inputs]."""
        weight: Tensor = cast("Any", self.module).weight
        return weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        """The bias, [outputs], or None."""
        bias: Tensor | None = cast("Any", self.module).bias
        return None if bias is None else bias[self.start : self.stop]

    @property
    def bias_in_output(self) -> Tensor | None:
        """The bias that the output has when an adapter changes it. Ranks add the bias after the sum of their terms."""
        return None if self.by_input else self.bias


class Targets:
    """All targets of a model, and the names that adapters have for them."""

    def __init__(self, module: Any, text_modules: Collection[nn.Module]) -> None:
        """Collect the targets.

        Args:
            module: The whole model, a PreTrainedModel whose layers have been prepared.
            text_modules: Modules that compute text. Their rows are the tokens of a flat batch.

        """
        head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
        in_text = {part for one in (*text_modules, head) if one is not None for part in one.modules()}
        self.by_name = {
            name: Target(part, start, stop, inputs, isinstance(part, nn.Embedding), part in in_text, split)
            for name, part, start, stop, inputs, split in _layers(module, embeddings)
        }
        self._renamings = _renamings(module)

    def find(self, name: str) -> Target | None:
        """Return the target that an adapter changes under `name`, or None.

        An adapter may have been trained with an older transformers release, whose names the current release translates.
        """
        for candidate in (name, self._renamed(name)):
            for prefix in _NO_PREFIXES:
                for one in (prefix + candidate, candidate.removeprefix(prefix)):
                    if one in self.by_name:
                        return self.by_name[one]
        return None

    def _renamed(self, name: str) -> str:
        key = f"{name}.weight"
        for renaming in self._renamings:
            key, _ = renaming.rename_source_key(key)
        return key.removesuffix(".weight")


def _layers(module: nn.Module, embeddings: nn.Module) -> Iterator[tuple[str, nn.Module, int, int, int, Split | None]]:
    """Yield the name, module, range of outputs, number of inputs and share of each target."""
    joined: set[nn.Module] = set()
    for path, part in module.named_modules():
        if isinstance(part, DecoderLayer):
            for name, layer, start, stop, split in part.projections():
                joined.add(layer)
                yield f"{path}.{name}", layer, start, stop, _shape(layer)[1], split
    for path, part in module.named_modules():
        if part in joined or ".experts." in path:
            continue
        name = path.replace(".mixture.", ".mlp.")  # `DecoderLayer` has its experts under another name
        if part is embeddings and isinstance(part, nn.Embedding):
            yield name, part, 0, part.embedding_dim, part.num_embeddings, None
        elif is_linear(part):
            outputs, inputs = _shape(part)
            yield name, part, 0, outputs, inputs, split_of(part)


def _shape(linear: Any) -> tuple[int, int]:
    """Return the number of outputs and inputs of a linear layer."""
    outputs, inputs = linear.shape if isinstance(linear, QuantizedLinear) else linear.weight.shape
    return outputs, inputs


def _renamings(module: Any) -> list[Any]:
    """Return the transformers renamings of published weights, without those that combine several weights."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    return [one for one in get_model_conversion_mapping(module) if isinstance(one, WeightRenaming)]
