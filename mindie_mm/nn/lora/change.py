"""The change that a LoRA adapter makes to one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from mindie_mm.nn.lora.targets import Target


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """The change of one layer, in the data type of the layer's input."""

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
    """Weight in place of the layer's own, in the shape of `Target.shape`."""

    @classmethod
    def of(cls, target: Target, parts: Mapping[str, Tensor], scaling: float, dtype: torch.dtype) -> Self:
        """Return the change of a layer, on the host.

        Args:
            target: The layer.
            parts: Tensors of the adapter's file: `a` and `b`, the `b_bias` of the second product, the `magnitude` of
                the rows, and the `bias` and the `weight` in place of the layer's own.
            scaling: Factor of `b @ a` and of `b_bias`.
            dtype: Data type of the model.

        """
        own = {name: tensor.float() for name, tensor in parts.items() if name != "weight"}
        a, b, added, growth = own.get("a"), own.get("b"), own.get("b_bias"), None
        b = None if b is None else b * scaling
        added = None if added is None else added * scaling
        if "bias" in own:
            difference = own["bias"] - (0 if target.bias is None else target.bias.detach().float().cpu())
            added = difference if added is None else added + difference
        if "magnitude" in own:
            assert a is not None
            assert b is not None
            changed = target.weight.detach().float().cpu() + b @ a
            growth = own["magnitude"] / torch.linalg.vector_norm(changed, dim=1) - 1
        return cls(target, a, b, added, growth, parts.get("weight")).to(target.input_dtype(dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are set, by name."""
        found = {name: getattr(self, name) for name in ("a", "b", "added", "growth", "weight")}
        return {name: one for name, one in found.items() if one is not None}

    def to(self, where: torch.device | torch.dtype) -> Self:
        """Return a copy on a device, or in a data type."""
        copies: dict[str, Any] = {name: tensor.to(where) for name, tensor in self.tensors().items()}
        return replace(self, **copies)

    def apply(self, given: Tensor, out: Tensor, rows: Tensor | None) -> None:
        """Change the output of the layer in place.

        Args:
            given: Input, [..., T, inputs] or ids int64 [..., T].
            out: Output of the joined layer, [..., T, outputs].
            rows: Rows of the adapter's requests, int64 [n], or None for all rows.

        """
        part = out.narrow(-1, self.target.start, self.target.num_outputs)
        axis = -1 if self.target.is_embedding else -2
        picked = given if rows is None else given.index_select(axis, rows)
        if self.weight is not None:
            whole = self._whole(picked, self.weight)
            if rows is None:
                part.copy_(whole)
            else:
                part.index_copy_(-2, rows, whole)
            return
        delta = None if self.a is None or self.b is None else linear(linear(picked, self.a), self.b)
        if self.growth is not None and delta is not None:
            before = part if rows is None else part.index_select(-2, rows)
            if self.target.bias is not None:
                before = before - self.target.bias
            delta = delta + (before + delta) * self.growth
        if self.added is not None:
            delta = self.added if delta is None else delta + self.added
        assert delta is not None
        if rows is None:
            part.add_(delta)
        else:
            part.index_add_(-2, rows, delta.expand(*picked.shape[:-1], -1).contiguous())

    def _whole(self, picked: Tensor, weight: Tensor) -> Tensor:
        """Return the output of the layer with another weight."""
        if self.target.is_embedding:
            scale = getattr(self.target.module, "embed_scale", None)  # of Gemma's embeddings
            found = embedding(picked, weight)
            return found if scale is None else found * scale.to(found.dtype)
        found = linear(picked, weight, self.target.bias)
        return found if self.added is None else found + self.added
