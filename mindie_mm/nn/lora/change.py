"""The change that a LoRA adapter makes to one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from mindie_mm.nn.lora.targets import Target
from mindie_mm.nn.split_linear import is_first, sum_on_all


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """The change of one layer, or of this rank's share of it, in the data type of the layer's input."""

    target: Target
    a: Tensor | None
    """[rank, inputs]."""
    b: Tensor | None
    """[outputs, rank], with the scaling."""
    added: Tensor | None
    """Difference of the biases, [outputs]."""
    growth: Tensor | None
    """Magnitude of the rows of the changed weight, divided by their norm, minus 1 (DoRA), [outputs]. The difference is
    stored, because bfloat16 has few digits for values close to 1."""
    weight: Tensor | None
    """Weight in place of the layer's own, [outputs, inputs], or [ids, width] of an embedding."""

    @classmethod
    def of(cls, target: Target, parts: Mapping[str, Tensor], scaling: float, dtype: torch.dtype) -> Self:
        """Return the change of a layer, on the host. Every rank must call this function.

        Args:
            target: The layer.
            parts: Tensors of the adapter's file: `a` and `b`, the `b_bias` of the second product, the `magnitude` of
                the rows, and the `bias` and the `weight` in place of the layer's own. peft also stores the weight of
                an output layer that it changes.
            scaling: Factor of `b @ a` and of `b_bias`.
            dtype: Data type of the model.

        """
        own = {name: target.share(name, tensor) for name, tensor in parts.items()}
        weight = own.pop("weight", None)
        if weight is not None and "a" in own and torch.equal(weight.to(target.weight), target.weight):
            weight = None
        own = {name: tensor.float() for name, tensor in own.items()}
        a, b, added, growth = own.get("a"), own.get("b"), own.get("b_bias"), None
        b = None if b is None else b * scaling
        added = None if added is None else added * scaling
        if "bias" in own:
            difference = own["bias"] - (0 if target.bias is None else target.bias.detach().float().cpu())
            added = difference if added is None else added + difference
        if target.by_input and not is_first():
            added = None  # the ranks' terms are summed
        if "magnitude" in own:
            assert a is not None
            assert b is not None
            base = target.weight.detach() if weight is None else weight
            squares = (base.float().cpu() + b @ a).square().sum(1)
            if target.by_input:
                sum_on_all(squares)
            growth = own["magnitude"] / squares.sqrt() - 1
        if weight is not None and a is not None and b is not None:
            weight = (weight.float() + b @ a) * (1 if growth is None else 1 + growth.unsqueeze(1))
            a = b = growth = None
        return cls(target, a, b, added, growth, weight).to(target.input_dtype(dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are set, by name."""
        found = {name: getattr(self, name) for name in ("a", "b", "added", "growth", "weight")}
        return {name: one for name, one in found.items() if one is not None}

    def to(self, where: torch.device | torch.dtype) -> Self:
        """Return a copy on a device, or in a data type."""
        copies: dict[str, Any] = {name: tensor.to(where) for name, tensor in self.tensors().items()}
        return replace(self, **copies)

    def apply(self, given: Tensor, product: Tensor, out: Tensor) -> None:
        """Change rows of a layer's output in place.

        Args:
            given: Input of the rows, [..., inputs], or ids int64 [...].
            product: Product of `given` and `a`, [..., rank], if the change has `a`.
            out: Output of the joined layer, [..., outputs].

        """
        part = out.narrow(-1, self.target.start, self.target.num_outputs)
        if self.weight is not None:
            part.copy_(self._whole(given, self.weight))
            return
        if self.b is not None and self.growth is not None:
            delta = linear(product, self.b)
            bias = self.target.bias_in_output
            before = part.clone() if bias is None else part - bias
            part.add_(delta.addcmul_(before.add_(delta), self.growth))
        elif self.b is not None and part.dim() == 2:
            part.addmm_(product, self.b.t())
        elif self.b is not None:
            part.add_(linear(product, self.b))
        if self.added is not None:
            part.add_(self.added)

    def _whole(self, given: Tensor, weight: Tensor) -> Tensor:
        """Return the output of the layer with another weight."""
        if self.target.is_embedding:
            scale = getattr(self.target.module, "embed_scale", None)  # of Gemma's embeddings
            found = embedding(given, weight)
            return found if scale is None else found * scale.to(found.dtype)
        found = linear(given, weight, self.target.bias_in_output)
        return found if self.added is None else found + self.added


class Joined:
    """The changes that an adapter makes to the layers that one module computes. They have the same input."""

    def __init__(self, changes: Sequence[Change], a: Tensor | None) -> None:
        """Join changes on their device. `a` is the concatenation of their matrices `a`, or None."""
        self._a = a
        self._changes: list[tuple[Change, int, int]] = []
        """Each change, with its range among the rows of `_a`."""
        start = 0
        for one in changes:
            stop = start + (0 if one.a is None else len(one.a))
            self._changes.append((replace(one, a=None), start, stop))
            start = stop

    @classmethod
    def of(cls, changes: Sequence[Change]) -> Self:
        """Copy changes to the device of their layers, and join them. One product is faster than several."""
        placed = [one.to(one.target.like.device) for one in changes]
        matrices = [one.a for one in placed if one.a is not None]
        return cls(placed, torch.cat(matrices) if matrices else None)

    @classmethod
    def largest(cls, targets: Sequence[Target], rank: int, dtype: torch.dtype) -> Self:
        """Return changes with all tensors except weights. Their values take no memory."""
        changes = []
        for target in targets:
            zero = torch.zeros((), dtype=target.input_dtype(dtype), device=target.like.device)
            outputs, b = zero.expand(target.num_outputs), zero.expand(target.num_outputs, rank)
            changes.append(Change(target, zero.expand(rank, target.num_inputs), b, outputs, outputs, None))
        return cls(changes, zero.expand(rank * len(targets), targets[0].num_inputs))

    def apply(self, given: Tensor, out: Tensor) -> None:
        """Change rows of the module's output in place. Input and output are those of `Change.apply`."""
        products = given if self._a is None else linear(given, self._a)
        for change, start, stop in self._changes:
            change.apply(given, products.narrow(-1, start, stop - start) if stop > start else products, out)
