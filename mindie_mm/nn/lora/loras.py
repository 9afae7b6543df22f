"""The LoRA adapters of a model: those on its device, and those of the rows that it computes.

Each changed layer adds the changes of all adapters in a batch to the rows of their requests. The rows of other requests
are not touched, so that the tokens of a request do not depend on its neighbours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from mindie_mm.device import upload
from mindie_mm.errors import LimitExceeded, OperationalError
from mindie_mm.nn.lora.adapter import Adapter, Change, read_adapter
from mindie_mm.nn.lora.targets import Target, Targets


@dataclass(frozen=True, slots=True)
class PlacedChange:
    """The change of one layer on the device, in the data type of the layer's input."""

    target: Target
    a: Tensor | None
    b: Tensor | None
    """[outputs, rank], with the scaling."""
    added: Tensor | None
    """Difference of the biases, [outputs]."""
    growth: Tensor | None
    """Magnitude of the rows of the changed weight, divided by their norm (DoRA), [outputs]."""
    weight: Tensor | None

    def apply(self, given: Tensor, out: Tensor, rows: Tensor | None) -> None:
        """Change the output of the layer in place.

        Args:
            given: Input, [..., T, inputs] or ids int64 [..., T].
            out: Output of the joined layer, [..., T, outputs].
            rows: Rows of the adapter's requests, int64 [n], or None for all rows.

        """
        target = self.target
        if target.is_embedding:
            self._replace_embeddings(given, out, rows)
            return
        part = out.narrow(-1, target.start, target.num_outputs)
        picked = given if rows is None else given.index_select(-2, rows)
        if self.weight is not None:
            before = part if rows is None else part.index_select(-2, rows)
            delta = linear(picked, self.weight, target.bias) - before
        elif self.a is not None and self.b is not None:
            delta = linear(linear(picked, self.a), self.b)
        else:
            delta = None
        if self.growth is not None and delta is not None:
            before = part if rows is None else part.index_select(-2, rows)
            if target.bias is not None:
                before = before - target.bias
            delta = delta * self.growth + before * (self.growth - 1)
        if self.added is not None:
            delta = self.added if delta is None else delta + self.added
        assert delta is not None
        if rows is None:
            part.add_(delta)
        else:
            part.index_add_(-2, rows, delta.expand(*picked.shape[:-1], -1).contiguous())

    def _replace_embeddings(self, ids: Tensor, out: Tensor, rows: Tensor | None) -> None:
        assert self.weight is not None
        scale = getattr(self.target.module, "embed_scale", None)  # of Gemma's embeddings
        found = embedding(ids if rows is None else ids.index_select(-1, rows), self.weight)
        found = found if scale is None else found * scale.to(found.dtype)
        if rows is None:
            out.copy_(found)
        else:
            out.index_copy_(-2, rows, found)


Placed = Mapping[nn.Module, Sequence[PlacedChange]]
Mix = Sequence[tuple[Placed, Tensor | None]]
"""The adapters of a batch with the rows of each, int64 [n]. None means all rows."""


class Loras:
    """The adapters of one model. A bounded number of them is on its device, the least recently used leave it."""

    def __init__(
        self, module: Any, text_modules: Collection[nn.Module], dtype: torch.dtype, max_loras: int, max_rank: int
    ) -> None:
        """Prepare the layers of a model. Requests without an adapter compute the same as before.

        Args:
            module: The whole model, whose layers have been prepared.
            text_modules: Modules that compute text.
            dtype: Data type of the model.
            max_loras: Maximum number of adapters on the device, and of different adapters in one batch.
            max_rank: Maximum rank of a change.

        """
        self.max_loras = max_loras
        self.known: dict[str, Adapter] = {}
        """The adapters that requests may use, by key."""
        self.running: Mix = ()
        """The adapters of the rows that the model computes."""
        self._num_rows = 0
        self._dtype = dtype
        self._max_rank = max_rank
        self._targets = Targets(module, text_modules)
        self._placed: OrderedDict[Adapter, Placed] = OrderedDict()
        self._most_values = 0
        for layer in {target.module for target in self._targets.by_name.values()}:
            layer.register_forward_hook(partial(_changed, self))

    @property
    def num_placed(self) -> int:
        """Number of adapters on the device."""
        return len(self._placed)

    def read(self, folder: Path, key: str = "") -> Adapter:
        """Read an adapter, but do not add it to `known`. This raises the errors of `read_adapter`, and the error below.

        Args:
            folder: Folder of the adapter.
            key: Key that the adapter must have, or an empty string.

        Raises:
            OperationalError: The adapter has another key.

        """
        adapter = read_adapter(folder, self._targets, self._max_rank)
        if key not in ("", adapter.key):
            raise OperationalError(f"the files in {folder} have changed since they were loaded; load them again")
        return adapter

    def reserve(self) -> int:
        """Fix the size of one adapter by the adapters that are known, and return the memory for all of them in bytes.

        The size is that of the largest rank in all linear layers, or of the largest known adapter, because an adapter
        with whole weights may be larger.
        """
        linears = [one for one in self._targets.by_name.values() if not one.is_embedding]
        values = sum(self._max_rank * (one.num_inputs + one.num_outputs) for one in linears)
        self._most_values = max(values, *(one.num_values() for one in self.known.values()), 0)
        return self.max_loras * self._most_values * self._dtype.itemsize

    def require_fitting(self, adapter: Adapter) -> None:
        """Raise LimitExceeded if an adapter is larger than the size that `reserve` has fixed."""
        if (values := adapter.num_values()) > self._most_values:
            raise LimitExceeded(
                f"the adapter has {values} values, and the memory of an adapter is reserved for {self._most_values}; "
                "raise max_lora_rank, or give the adapter at the start (--lora)"
            )

    def keep(self, keys: Collection[str]) -> None:
        """Remove all adapters except those with `keys`."""
        for key in self.known.keys() - keys:
            self._placed.pop(self.known.pop(key), None)

    def mix(self, batch: Sequence[tuple[Adapter | None, int]], device: torch.device) -> Mix:
        """Place the adapters of a batch on the device, and return them with their rows.

        Args:
            batch: The adapter of each request in the batch, or None, and its number of rows.
            device: Device of the rows.

        """
        ranges: dict[Adapter, list[range]] = {}
        row = 0
        for adapter, count in batch:
            if adapter is not None and count:
                ranges.setdefault(adapter, []).append(range(row, row + count))
            row += count
        self._num_rows = row
        mixed: list[tuple[Placed, Tensor | None]] = []
        for adapter, parts in ranges.items():
            rows = np.concatenate([np.arange(part.start, part.stop) for part in parts])
            everywhere = len(rows) == row
            mixed.append((self._place(adapter, ranges), None if everywhere else upload(rows, device)))
        return mixed

    @contextmanager
    def applied(self, mix: Mix) -> Iterator[None]:
        """Apply the adapters of a batch to what the model computes inside the context."""
        self.running = mix
        try:
            yield
        finally:
            self.running = ()

    def require_rows(self, num_rows: int) -> None:
        """Raise OperationalError unless a layer computes one row for each token of the batch."""
        if num_rows != self._num_rows:
            raise OperationalError(
                f"an adapter changes a layer that computes {num_rows} rows for {self._num_rows} tokens, which is not "
                "served beside other requests; merge the adapter into its base model"
            )

    def _place(self, adapter: Adapter, needed: Collection[Adapter]) -> Placed:
        if adapter in self._placed:
            self._placed.move_to_end(adapter)
            return self._placed[adapter]
        while len(self._placed) >= self.max_loras:
            oldest = next(one for one in self._placed if one not in needed)
            del self._placed[oldest]
        placed: dict[nn.Module, list[PlacedChange]] = {}
        for change in adapter.changes:
            placed.setdefault(change.target.module, []).append(_placed(change, self._dtype))
        self._placed[adapter] = placed
        return placed


def _changed(loras: Loras, layer: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
    """Change the output of a layer in place, as a forward hook."""
    for placed, rows in loras.running:
        for change in placed.get(layer, ()):
            if rows is not None:
                loras.require_rows(out.shape[-2])
            change.apply(given[0], out, rows)


def _placed(change: Change, dtype: torch.dtype) -> PlacedChange:
    target = change.target
    like: Any = next(target.module.parameters(), None)
    like = next(target.module.buffers()) if like is None else like
    if like.dtype in (torch.float32, torch.bfloat16, torch.float16) and isinstance(target.module, nn.Linear):
        dtype = like.dtype  # a tower may compute in another data type

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(like.device, dtype)

    scaled = None if change.b is None else change.b.float() * change.scaling
    return PlacedChange(
        target, there(change.a), there(scaled), there(_added(change)), there(_growth(change)), there(change.weight)
    )


def _added(change: Change) -> Tensor | None:
    """Return the sum of the changes of a layer's bias, float32 [outputs], or None."""
    added = None if change.b_bias is None else change.b_bias.float() * change.scaling
    if change.bias is not None:
        own = change.target.bias
        difference = change.bias.float() - (0 if own is None else own.detach().float().cpu())
        added = difference if added is None else added + difference
    return added


def _growth(change: Change) -> Tensor | None:
    """Return the magnitude of each row of the changed weight, divided by the row's norm, float32 [outputs], or None."""
    if change.magnitude is None or change.a is None or change.b is None:
        return None
    weight = change.target.weight.detach().float().cpu()
    changed = weight + change.scaling * (change.b.float() @ change.a.float())
    norms: Tensor = torch.linalg.vector_norm(changed, dim=1)
    return change.magnitude.float() / norms
