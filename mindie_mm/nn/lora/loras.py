"""The LoRA adapters of a model: those on its device, and those of the rows that it computes.

Each changed layer adds the changes of all adapters in a batch to the rows of their requests. The rows of other requests
are not touched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mindie_mm.device import upload
from mindie_mm.errors import LimitExceeded, OperationalError
from mindie_mm.nn.lora.adapter import Adapter, AdapterFiles
from mindie_mm.nn.lora.change import Joined
from mindie_mm.nn.lora.targets import Target, Targets
from mindie_mm.nn.split_linear import change_product, is_same_on_all, split_of

T = TypeVar("T")
Placed = Mapping[nn.Module, Joined]
Rows = Tensor | range | None
"""Rows of the requests with an adapter: int64 [n], or a range, whose rows are not copied. None means all rows."""
Mix = Sequence[tuple[Placed, Rows]]
"""The adapters of a batch with the rows of each."""


class OnAll(Protocol):
    """A function that calls another one on every rank. If it fails on one of them, it raises the error on all ranks."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Return the result of `work` on this rank."""


def _alone(work: Callable[[], T]) -> T:
    return work()


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
            if split_of(layer) is None:
                layer.register_forward_hook(partial(_changed, self))
            else:
                change_product(layer, partial(_change, self, layer))

    @property
    def num_placed(self) -> int:
        """Number of adapters on the device."""
        return len(self._placed)

    def read(self, folder: Path, key: str = "", on_all: OnAll = _alone) -> Adapter:
        """Read an adapter, but do not add it to `known`. This raises the errors of `AdapterFiles`, and those below.

        Args:
            folder: Folder of the adapter.
            key: Key that the adapter must have, or an empty string.
            on_all: Function that calls another one on every rank.

        Raises:
            UnsupportedCheckpoint: A change is not finite.
            OperationalError: The adapter has another key, or the files changed while the ranks read them.

        """
        files = on_all(lambda: AdapterFiles(folder, self._targets, self._max_rank))

        def adapter() -> Adapter:
            if not is_same_on_all(files.key) or key not in ("", files.key):
                raise OperationalError(f"the files in {folder} have changed since they were loaded; load them again")
            return files.adapter(self._dtype)

        return on_all(adapter)

    @cached_property
    def _largest(self) -> Placed:
        """Changes of the maximum rank in all linear layers. Their values take no memory."""
        linears = _by_module(one for one in self._targets.by_name.values() if not one.is_embedding)
        return {layer: Joined.largest(own, self._max_rank, self._dtype) for layer, own in linears.items()}

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
        mixed: list[tuple[Placed, Rows]] = []
        for adapter, parts in ranges.items():
            around, count = range(parts[0].start, parts[-1].stop), sum(map(len, parts))
            rows: Rows = None if count == row else around
            if count < len(around):
                rows = upload(np.concatenate([np.arange(part.start, part.stop) for part in parts]), device)
            mixed.append((self._place(adapter, ranges), rows))
        return mixed

    @contextmanager
    def applied(self, mix: Mix) -> Iterator[None]:
        """Apply the adapters of a batch to all computations of the model inside the context."""
        self.running = mix
        try:
            yield
        finally:
            self.running = ()

    @contextmanager
    def largest(self, num_rows: int | None, device: torch.device) -> Iterator[None]:
        """Apply the adapter with the largest temporary tensors inside the context, to measure the memory of a step.

        Args:
            num_rows: Number of rows. All rows but the last use the adapter, so that they are copied. None means that
                all rows use it, as in towers.
            device: Device of the rows.

        """
        rows = None if num_rows is None else torch.arange(max(1, num_rows - 1), device=device)
        self._num_rows = num_rows or 0
        with self.applied([(self._largest, rows)]):
            yield

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
        changes = {change.target: change for change in adapter.changes}
        placed = {layer: Joined.of([changes[one] for one in own]) for layer, own in _by_module(changes).items()}
        self._placed[adapter] = placed
        return placed


def _by_module(targets: Iterable[Target]) -> dict[nn.Module, list[Target]]:
    """Return the targets that each module computes."""
    found: dict[nn.Module, list[Target]] = {}
    for target in targets:
        found.setdefault(target.module, []).append(target)
    return found


def _changed(loras: Loras, layer: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
    """Change the output of a layer in place, as a forward hook."""
    _change(loras, layer, given[0], out)


def _change(loras: Loras, layer: nn.Module, given: Tensor, out: Tensor) -> None:
    for placed, rows in loras.running:
        if (joined := placed.get(layer)) is None:
            continue
        if rows is None:
            joined.apply(given, out)
            continue
        loras.require_rows(out.shape[-2])
        axis = -1 if isinstance(layer, nn.Embedding) else -2  # of the input
        if isinstance(rows, range):
            joined.apply(given.narrow(axis, rows.start, len(rows)), out.narrow(-2, rows.start, len(rows)))
        else:
            own = out.index_select(-2, rows)
            joined.apply(given.index_select(axis, rows), own)
            out.index_copy_(-2, rows, own)
