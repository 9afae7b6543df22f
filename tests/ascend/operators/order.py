"""When what an operator computes is to be seen: after what its stream did before, and by nobody who did not wait.

A launch drains its stream, which runs the copies that are queued there and what those wait for. The result is computed
at once, but its bytes are queued on the stream and the memory is poisoned: whoever reads it from another stream without
waiting reads 0xFF, which is NaN as a float and -1 as an integer. Results of more than DEFERRED_BYTES, and those that do
not lie in one piece, are written at once: to poison a cache of pages for one row would cost more than it shows.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
import torch_npu
from torch import Tensor

from tests.ascend.operators.aliases import span

DEFERRED_BYTES = 2**20
_POISON = 0xFF


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libhccl.so")
    library.sim_drain.argtypes = [ctypes.c_void_p]
    library.sim_enqueue_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return library


def begin(device: torch.device) -> int:
    """The current stream of `device`, drained."""
    stream: int = torch_npu._C._npu_getCurrentRawStream(device.index)
    _library().sim_drain(stream)
    return stream


def publish(stream: int, tensor: Tensor) -> None:
    """Has what the device tensor `tensor` holds by now appear in the order of `stream`."""
    piece = span(tensor)
    if piece is not None and 0 < piece[1] <= DEFERRED_BYTES:
        _defer(stream, piece[0], piece[0], piece[1])


def put(stream: int, tensor: Tensor, value: Tensor) -> None:
    """Writes the host tensor `value` into the device tensor `tensor` of the same strides, both in one piece."""
    target, source = span(tensor), span(value)
    assert target is not None
    assert source is not None
    if target[1] > DEFERRED_BYTES:
        ctypes.memmove(target[0], source[0], target[1])
    elif target[1]:
        _defer(stream, target[0], source[0], target[1])


def _defer(stream: int, target: int, source: int, size: int) -> None:
    if _library().sim_enqueue_write(stream, target, source, size):  # nothing was queued: another stream still uses it
        raise RuntimeError(_library().aclGetRecentErrMsg().decode())
    ctypes.memset(target, _POISON, size)


def synchronise(device: torch.device) -> None:
    """What an operator does whose result's shape the host must know."""
    torch.npu.current_stream(device).synchronize()
