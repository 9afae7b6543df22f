"""The LoRA adapters of a model: those on its device, and those of the rows that it computes.

Each changed layer adds the changes of all adapters in a batch to the rows of their requests. The rows of other requests
are not touched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mindie_mm.device import upload
from mindie_mm.errors import LimitExceeded, OperationalError
from mindie_mm.nn.lora.adapter import Adapter, read_adapter
from mindie_mm.nn.lora.change import Change
from mindie_mm.nn.lora.targets import Targets

Placed = Mapping[nn.Module, Sequence[Change]]
Mix = Sequence[tuple[Placed, Tensor | None]]
"""The adapters of a batch with the rows of each, int64 [n]. None means all rows."""


class Loras:
    """The adapters of one model.

    At most `max_loras` adapters are on its device at the same time. The least recently used one is removed first.
    """

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
        adapter = read_adapter(folder, self._targets, self._max_rank, self._dtype)
        if key not in ("", adapter.key):
            raise OperationalError(f"the files in {folder} have changed since they were loaded; load them again")
        return adapter

    def reserve(self) -> int:
        """Fix the size of one adapter by the adapters that are known, and return the memory for all of them in bytes.

        The size is that of the largest rank in all linear layers, with biases and magnitudes, or of the largest known
        adapter, because an adapter with whole weights may be larger.
        """
        linears = [one for one in self._targets.by_name.values() if not one.is_embedding]
        values = sum(self._max_rank * (one.num_inputs + one.num_outputs) + 2 * one.num_outputs for one in linears)
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

    def mix(self, batch: Iterable[tuple[Adapter | None, int]], device: torch.device) -> Mix:
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
        """Apply the adapters of a batch to all computations of the model inside the context."""
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
        placed: dict[nn.Module, list[Change]] = {}
        for change in adapter.changes:
            placed.setdefault(change.target.module, []).append(change.to(change.target.like.device))
        self._placed[adapter] = placed
        return placed


def _changed(loras: Loras, layer: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
    """Change the output of a layer in place, as a forward hook."""
    for placed, rows in loras.running:
        for change in placed.get(layer, ()):
            if rows is not None:
                loras.require_rows(out.shape[-2])
            change.apply(given[0], out, rows)
