"""Capture of operators in a graph.

A captured operator runs when its graph is launched. Its device tensors keep the addresses and its host arguments keep
the values of the capture. Shapes of results come from torch_npu's kernels for the device "meta".
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.ascend.operators import order
from tests.ascend.operators.aliases import on_device

CAPTURES, UPDATES = 1, 2
_FAILED = 507018
_numbers = count()


@dataclass
class _Call:
    name: str
    compute: Callable[[], None]
    read: list[StorageWeakRef]
    """Storages of the device tensors that no captured operator has written, so they are not the graph's own."""


_calls: dict[int, _Call] = {}


@cache
def _library() -> Any:
    library = order.library()
    library.sim_dropped_call.restype = ctypes.c_long
    library.sim_capture_mode.argtypes = [ctypes.c_void_p]
    library.sim_captured_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.sim_captured_write.restype = ctypes.c_bool
    for take in (library.sim_capture_call, library.sim_update_call):
        take.argtypes = [ctypes.c_void_p, ctypes.c_long]
    library.sim_set_calls(_run)
    return library


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)
def _run(number: int) -> int:
    """Compute an operator of a launched graph. Return a code of ACL."""
    call = _calls[number]
    for storage in call.read:
        if storage.expired():
            print(f"a graph launches {call.name} on a tensor that was freed after the capture", flush=True)
            return _FAILED
    try:
        with torch.inference_mode():  # any thread may run the graph
            call.compute()
    except Exception:  # noqa: BLE001 - C cannot pass it on
        traceback.print_exc()
        return _FAILED
    return 0


def mode(stream: int) -> int:
    """Return CAPTURES or UPDATES if an operator on `stream` is captured or replaces a captured operator, or else 0."""
    return int(_library().sim_capture_mode(stream))


def capture(
    stream: int, name: str, compute: Callable[[], None], read: Sequence[Tensor], written: Sequence[Tensor]
) -> None:
    """Capture an operator that `compute` computes. `read` and `written` are its device tensors."""
    # Collectives write tensors, too, so the simulator knows which tensors are the graph's own. The address of an empty
    # slice may be after the end of its tensor.
    outside = [one for one in read if one.numel() and not _library().sim_captured_write(stream, one.data_ptr())]
    for tensor in read:
        order.note_read(stream, tensor)
    for tensor in written:
        order.note_write(stream, tensor)
    _forget()
    number = next(_numbers)
    _calls[number] = _Call(name, compute, [StorageWeakRef(one.untyped_storage()) for one in outside])
    _library().sim_capture_call(stream, number)


def update(stream: int, name: str, compute: Callable[[], None]) -> None:
    """Replace the next captured operator of the task group that `stream` updates."""
    _forget()
    number = next(_numbers)
    _calls[number] = _Call(name, compute, [])
    order.check(_library().sim_update_call(stream, number))


def _forget() -> None:
    while (dropped := _library().sim_dropped_call()) >= 0:
        del _calls[dropped]


def on_meta(value: Any) -> Any:
    """Convert an argument to the device "meta", on which an operator computes only shapes."""
    if on_device(value):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(on_meta(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def like(value: Any, device: torch.device) -> Any:
    """Return new device tensors with the shapes of tensors on "meta"."""
    if isinstance(value, list | tuple):
        return type(value)(like(item, device) for item in value)
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


def tensors(value: Any) -> list[Tensor]:
    """Return the device tensors in an argument."""
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if on_device(value) else []
