"""The order in which results become visible.

A result becomes visible after earlier work on the same stream, and only to code that waits for the stream. Before an
operator is launched, its stream is drained: the queued copies run, and also the work that these copies wait for. The
host then computes the result immediately, but the bytes of the result are queued on the stream. Until the queue has
written them, the memory is filled with 0xFF. Code that reads without waiting therefore reads NaN as a float and -1 as
an integer. Operators that write rows to a large cache queue only these rows, because filling the cache for every row
would be too slow. Each launch reports all its reads and writes to the simulator, which refuses memory that another
stream may still read or write.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
import torch_npu
from torch import Tensor

from tests.ascend.operators.aliases import alias, span

_LARGE = 2**20
"""Size in bytes of a tensor of which only the written rows are queued."""


@cache
def library() -> ctypes.CDLL:
    """Return the simulator."""
    library = ctypes.CDLL("libhccl.so")
    library.sim_drain.argtypes = [ctypes.c_void_p]
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.sim_enqueue_write.argtypes = [pointer, pointer, pointer, size]
    library.sim_enqueue_zeros.argtypes = [pointer, pointer, size]
    library.sim_enqueue_pieces.argtypes = [pointer, pointer, size, pointer, size, size, pointer]
    for note in (library.sim_reads, library.sim_writes):
        note.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.sim_launch.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_bool]
    library.sim_clock_is_on.restype = ctypes.c_bool
    library.sim_counted_add.argtypes = [ctypes.c_char_p, ctypes.c_long]
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return library


def begin(device: torch.device) -> int:
    """Drain the current stream of `device`, and return the stream."""
    stream: int = torch_npu._C._npu_getCurrentRawStream(device.index)
    library().sim_drain(stream)
    return stream


def count(counter: str, number: int) -> None:
    """Add `number` to one of the simulator's counters."""
    library().sim_counted_add(counter.encode(), number)


@cache
def clock_is_on() -> bool:
    """Return whether the virtual clocks are used."""
    return bool(library().sim_clock_is_on())


def launch(stream: int, moved: int, operations: int, on_aicpu: bool) -> None:
    """Queue a kernel that moves `moved` bytes and computes `operations`, for the virtual clocks."""
    library().sim_launch(stream, moved, operations, on_aicpu)


def note_read(stream: int, tensor: Tensor) -> None:
    """Report that a launch on `stream` reads the device tensor `tensor`. Raise RuntimeError if this is a race."""
    check(library().sim_reads(stream, *reach(tensor)))


def note_write(stream: int, tensor: Tensor) -> None:
    """Report that a launch on `stream` writes the device tensor `tensor`. Raise RuntimeError if this is a race."""
    check(library().sim_writes(stream, *reach(tensor)))


def reach(tensor: Tensor) -> tuple[int, int]:
    """Return the address and the size in bytes of a tensor's memory, from the first element to the last."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def publish(stream: int, tensor: Tensor, rows: Tensor | None = None) -> None:
    """Make the contents of the device tensor `tensor` visible in the order of `stream`.

    Args:
        stream: The stream.
        tensor: The tensor, whose memory contains the result.
        rows: Indices of the written rows in the first axis, on the host. None if any row may have changed.

    """
    same, piece = alias(tensor), span(tensor)
    if rows is not None and tensor.is_contiguous() and tensor.nbytes > _LARGE:
        if len(rows):
            _defer_pieces(stream, tensor, rows * same[0].nbytes, same[0].nbytes, same[rows])
    elif piece is not None:
        _defer(stream, piece[0], piece[0], piece[1])
    else:
        offsets, size = _pieces(tensor)
        _defer_pieces(stream, tensor, offsets, size, same.contiguous())


def publish_zeros(stream: int, tensor: Tensor) -> None:
    """Queue zeros for a device tensor without gaps. A cache of pages thus needs no memory before rows are written."""
    address, size = reach(tensor)
    if size:
        check(library().sim_enqueue_zeros(stream, address, size))


def put(stream: int, tensor: Tensor, value: Tensor) -> None:
    """Write the host tensor `value` to the device tensor `tensor`. Both must have the same strides, without gaps."""
    target, source = span(tensor), span(value)
    assert target is not None
    assert source is not None
    _defer(stream, target[0], source[0], target[1])


def _defer(stream: int, target: int, source: int, size: int) -> None:
    if size:
        check(library().sim_enqueue_write(stream, target, source, size))


def _pieces(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the offsets of a tensor's pieces without gaps, in bytes in the order of the axes, and their size."""
    size, axes = 1, [*zip(tensor.shape, tensor.stride(), strict=True)]
    while axes and (axes[-1][0] == 1 or axes[-1][1] == size):
        size *= axes.pop()[0]
    offsets = torch.zeros(1, dtype=torch.int64)
    for length, stride in axes:
        offsets = (offsets.unsqueeze(1) + torch.arange(length) * stride).flatten()
    return offsets * tensor.element_size(), size * tensor.element_size()


def _defer_pieces(stream: int, tensor: Tensor, offsets: Tensor, size: int, values: Tensor) -> None:
    """Queue writes of `values` to pieces of `tensor`, each of `size` bytes."""
    offsets = offsets.contiguous()
    given = offsets.data_ptr(), len(offsets), size, values.data_ptr()
    check(library().sim_enqueue_pieces(stream, *reach(tensor), *given))


def check(code: int) -> None:
    """Raise CANN's error if `code` is not 0."""
    if code:  # another stream may still use the memory, and nothing was queued
        raise RuntimeError(library().aclGetRecentErrMsg().decode())


def synchronise(device: torch.device) -> None:
    """Wait for the device, as an operator does if the host needs to know the shape of its result."""
    torch.npu.current_stream(device).synchronize()
