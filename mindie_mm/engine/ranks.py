"""The ranks of an engine. Each rank is a process with a share of the text model's weights.

All ranks run the same steps. Each rank receives the same messages, maps the same shared memory and does the same
scheduling. This module synchronizes only values that may differ between ranks: results of rank 0, failures of a single
rank, and memory sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from mindie_mm.device import Device, default_num_threads, open_device
from mindie_mm.errors import DeviceError, MindieMMError
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.environment import keep_collectives_local, set_local_rank

T = TypeVar("T")

_log = logging.getLogger(__name__)

PATIENCE = timedelta(minutes=2)
"""Time that a failed rank waits for the other ranks to receive its error. A rank that waits for the failed rank inside
a collective operation cannot receive the error. In this case the failed rank ends, and all other ranks are ended."""
LOADING_PATIENCE = timedelta(hours=2)
"""Value of `PATIENCE` while weights are loaded, because the ranks may need different times."""
_FOREVER = timedelta(days=365)  # for an idle engine, which waits for its next message
_INLINE = 504
"""Maximum number of bytes of a message that are sent together with the message's length."""


class RankFailed(Exception):
    """An error of this rank that the other ranks did not receive, because they wait in a collective operation."""

    def __init__(self, error: MindieMMError) -> None:
        super().__init__(str(error))
        self.error = error


class Ranks:
    """The ranks of an engine. This class implements a single rank."""

    number = 0
    """Rank of this process, from 0. Rank 0 communicates with the parent."""
    count = 1

    def num_threads(self) -> int:
        """Return the default number of CPU threads of this rank."""
        return default_num_threads()

    def open_device(self, name: str) -> Device:
        """Open a device like `device.open_device`, and make it the current device.

        Raise DeviceError if there are fewer devices than ranks.
        """
        device = open_device(name)
        device.use()
        return device

    def broadcast(self, kind: Any, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 only, and return its result on every rank. `kind` is the result's type for msgpack."""
        return make()

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite `tensor` on every rank by the tensor of rank 0. The host does not wait for an accelerator."""

    def all_reduce_error(self, error: MindieMMError | None, patience: timedelta = PATIENCE) -> MindieMMError | None:
        """Return the error of the lowest rank that has an error, or None. All ranks get the same result.

        Raise RankFailed if `error` is given and the other ranks do not call this method within `patience`.
        """
        return error

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest of the numbers that the ranks pass."""
        return number

    def run_on_all(self, work: Callable[[], T], patience: timedelta = PATIENCE) -> T:
        """Run `work` on every rank and return this rank's result. If a rank fails, raise its error on all ranks.

        A rank that fails waits for the other ranks for the time `patience`.
        """
        failure: MindieMMError | None = None
        try:
            result = work()
        except MindieMMError as error:
            failure = error
        if (failure := self.all_reduce_error(failure, patience)) is not None:
            raise failure
        return result

    def owners(self, costs: Sequence[int]) -> list[int]:
        """Assign a rank to each item so that the ranks have similar costs. All ranks get the same result.

        Args:
            costs: Cost of each item.

        """
        sums = [0] * self.count
        owners = [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            owners[index] = sums.index(min(sums))
            sums[owners[index]] += costs[index]
        return owners

    def all_gather(
        self, own: Sequence[Tensor], owners: Sequence[int], rows: Sequence[int], like: Tensor
    ) -> list[Tensor]:
        """Return the tensors of all ranks, each [rows, width].

        Args:
            own: Tensors of this rank, in the order of `owners`.
            owners: Rank of each tensor.
            rows: Number of rows of each tensor.
            like: Empty tensor, [0, width], with the width, dtype and device of all tensors.

        """
        return list(own)


ALONE = Ranks()


class _Group(Ranks):
    """The ranks of torch.distributed's default process group."""

    def __init__(self) -> None:
        self.number = dist.get_rank()
        self.count = dist.get_world_size()
        # Use a separate group without a timeout, so that the model's collective operations do not delay error reports.
        self._control = dist.new_group(backend="gloo", timeout=_FOREVER)

    def num_threads(self) -> int:
        return max(1, default_num_threads() // self.count)

    def open_device(self, name: str) -> Device:
        device = open_device(name)
        if device.name != "cpu" and (num_devices := torch.accelerator.device_count()) < self.count:
            raise DeviceError(
                f"tensor_parallel is {self.count}, but the number of visible {device.name} devices "
                f"is {num_devices}; lower tensor_parallel, or make more devices visible"
            )
        return device

    def broadcast(self, kind: Any, make: Callable[[], T]) -> T:
        if self.number == 0:
            value = make()
            self._broadcast(msgspec.msgpack.encode(value), 0)
            return value
        received: T = msgspec.msgpack.decode(self._broadcast(None, 0), type=kind)
        return received

    def broadcast_tensor(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)

    def all_reduce_error(self, error: MindieMMError | None, patience: timedelta = PATIENCE) -> MindieMMError | None:
        first = torch.tensor(self.count if error is None else self.number)
        work = dist.all_reduce(first, dist.ReduceOp.MIN, group=self._control, async_op=True)
        try:
            work.wait(_FOREVER if error is None else patience)
        except RuntimeError as lost:
            if error is None:
                raise
            _log.critical("rank %d failed, and the other ranks did not receive its error", self.number, exc_info=error)
            raise RankFailed(error) from lost
        if (rank := int(first)) == self.count:
            return None
        own = None if error is None else msgspec.msgpack.encode(Failure.of(error))
        failure = msgspec.msgpack.decode(self._broadcast(own if rank == self.number else None, rank), type=Failure)
        return error if rank == self.number else failure.exception()

    def all_reduce_min(self, number: int) -> int:
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._control)
        return int(least)

    def all_gather(
        self, own: Sequence[Tensor], owners: Sequence[int], rows: Sequence[int], like: Tensor
    ) -> list[Tensor]:
        pieces = []
        for rank in range(self.count):
            lengths = [length for length, owner in zip(rows, owners, strict=True) if owner == rank]
            block = torch.cat([like, *own]) if rank == self.number else like.new_empty(sum(lengths), like.shape[1])
            if lengths:
                dist.broadcast(block, rank)
            pieces.append(iter(block.split(lengths)))
        return [next(pieces[owner]) for owner in owners]

    def _broadcast(self, data: bytes | None, source: int) -> bytes:
        """Return the `data` of rank `source` on all ranks. The other ranks pass None."""
        head = torch.zeros(8 + _INLINE, dtype=torch.uint8)
        if data is not None:
            begun = _bytes(len(data).to_bytes(8) + data[:_INLINE])
            head[: len(begun)] = begun
        dist.broadcast(head, source, group=self._control)
        size = int.from_bytes(head[:8].numpy().tobytes())
        if size <= _INLINE:
            return head[8 : 8 + size].numpy().tobytes()
        whole = torch.empty(size, dtype=torch.uint8) if data is None else _bytes(data)
        dist.broadcast(whole, source, group=self._control)
        return whole.numpy().tobytes()


def join(number: int, count: int, store: str, device: str, first_device: int = 0) -> Ranks:
    """Join the ranks of an engine. Every rank must call this function.

    Args:
        number: Rank of this process.
        count: Number of ranks.
        store: Path of an initially empty file through which the ranks find each other.
        device: Device that the engine runs on.
        first_device: Index of the device of rank 0, if the device is an accelerator.

    """
    keep_collectives_local()
    set_local_rank(number)
    backend = "gloo"
    with suppress(MindieMMError):  # `open_device` reports a missing device later, when it can report it to all ranks
        if (kind := open_device(device).name) != "cpu" and (
            index := first_device + number
        ) < torch.accelerator.device_count():
            set_local_rank(index)
            torch.accelerator.set_device_index(index)  # any other call before this one would initialize device 0
            backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=number, world_size=count)
    return _Group()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
