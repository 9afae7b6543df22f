"""Recordings of torch operators on the CPU, which replace CUDA graphs in tests and obey the same rules.

A replay runs the recorded operators on the recorded tensors and runs none of the Python code again. A test can
therefore detect whether Python code passes a value from one step to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindie_mm.device.cpu import CPU
from mindie_mm.device.cpu.cpu_kernels import CPUKernels
from mindie_mm.device.cpu.decode_step import DecodeStep, StepLinear

aten = torch.ops.aten
_WAITING = {
    aten.item.default,
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
"""Operators that would wait for a GPU and therefore make a recording fail. Indexing with booleans would do the same."""
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Recording(TorchDispatchMode):
    """A context that records the operators launched inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_booleans = func in _INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1])
        if func in _WAITING or by_booleans or (func is aten.repeat_interleave.Tensor and not kwargs):
            raise RuntimeError(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self, _: Sequence[int]) -> None:
        """Launch the operators again on the same memory."""
        for func, args, kwargs, result in self._calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(work: Callable[[], object]) -> Callable[[Sequence[int]], object]:
    """Record the operators of `work` as `Device.record` does, and return a function that replays them."""
    recording = Recording()
    with recording:
        work()
    return recording.replay


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the CPU device record its work, and return a list that counts how often each recording is replayed."""
    launches: list[int] = []

    def counted(_: type[CPU], work: Callable[[], object]) -> Callable[[Sequence[int]], object]:
        replay, number = record(work), len(launches)
        launches.append(0)

        def launch(lengths: Sequence[int]) -> None:
            launches[number] += 1
            replay(lengths)

        return launch

    for kind in (DecodeStep, StepLinear):  # compiled code is no operator, so a recording would not contain it
        monkeypatch.setattr(kind, "takes", lambda *_: False)
    monkeypatch.setattr(CPU, "records", True)
    monkeypatch.setattr(CPUKernels, "joins_experts", True)  # to select experts without a wait
    monkeypatch.setattr(CPU, "record", classmethod(counted))
    return launches
