"""When what an operator computes is to be seen: after what its stream did before, and by nobody who did not wait.

A launch drains its stream, which runs the copies that are queued there and what those wait for. The result is computed
at once, but its bytes are queued on the stream and the memory is poisoned: whoever reads it from another stream without
waiting reads 0xFF, which is NaN as a float and -1 as an integer. Results of more than DEFERRED_BYTES, and those that do
not lie in one piece, are written at once: to poison a cache of pages for one row would cost more than it shows. The
simulator is told all that a launch reads and writes, and refuses what another stream may still write or read.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
import torch_npu
from torch import Tensor

from tests.ascend.operators.aliases import span

DEFERRED_BYTES = 2**20


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libhccl.so")
    library.sim_drain.argtypes = [ctypes.c_void_p]
    library.sim_enqueue_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    for note in (library.sim_reads, library.sim_writes):
        note.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return library


def begin(device: torch.device) -> int:
    """The current stream of `device`, drained."""
    stream: int = torch_npu._C._npu_getCurrentRawStream(device.index)
    _library().sim_drain(stream)
    return stream


def note_read(stream: int, tensor: Tensor) -> None:
    """Says that what is launched on `stream` reads the device tensor `tensor`. RuntimeError where that is a race."""
    _check(_library().sim_reads(stream, *_reach(tensor)))


def _note_write(stream: int, tensor: Tensor) -> None:
    _check(_library().sim_writes(stream, *_reach(tensor)))


def _reach(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes from the first element to the last, gaps and all."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def publish(stream: int, tensor: Tensor) -> None:
    """Has what the device tensor `tensor` holds by now appear in the order of `stream`."""
    piece = span(tensor)
    if piece is not None and 0 < piece[1] <= DEFERRED_BYTES:
        _defer(stream, piece[0], piece[0], piece[1])
    else:
        _note_write(stream, tensor)


def put(stream: int, tensor: Tensor, value: Tensor) -> None:
    """Writes the host tensor `value` into the device tensor `tensor` of the same strides, both in one piece."""
    target, source = span(tensor), span(value)
    assert target is not None
    assert source is not None
    if target[1] > DEFERRED_BYTES:
        _note_write(stream, tensor)
        ctypes.memmove(target[0], source[0], target[1])
    elif target[1]:
        _defer(stream, target[0], source[0], target[1])


def _defer(stream: int, target: int, source: int, size: int) -> None:
    _check(_library().sim_enqueue_write(stream, target, source, size))


def _check(code: int) -> None:
    if code:  # nothing was queued: another stream still uses it
        raise RuntimeError(_library().aclGetRecentErrMsg().decode())


def synchronise(device: torch.device) -> None:
    """What an operator does whose result's shape the host must know."""
    torch.npu.current_stream(device).synchronize()
