"""Graphs of an NPU (aclgraph): operators that are captured once and then launched together.

Fused attention takes the lengths of sequences from the host, so they must be updated before each launch. torch_npu
captures each call to the operator together with an event. A launch waits for one update per captured call, and would
wait forever without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

from mindie_mm.settings.environment import hccl_expansion_mode


def why_not_record() -> str | None:
    """Implement `Device.why_not_record`."""
    if hccl_expansion_mode() != "AIV":
        return None
    return (
        "HCCL_OP_EXPANSION_MODE is AIV, with which CANN fails to capture graphs or waits forever. Unset it, or pass "
        "--enforce-eager"
    )


def record(work: Callable[[], object]) -> Callable[[Sequence[int]], None]:
    """Implement `Device.record`."""
    npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
    current, aside, graph = npu.current_stream(), _aside(npu.current_device()), npu.NPUGraph()
    with npu.stream(current):  # torch.npu.graph does not restore the current stream if it fails
        aside.wait_stream(current)
        try:
            with npu.stream(aside):
                work()  # operators are compiled and tried at their first call
        finally:
            current.wait_stream(aside)  # even after a failure, because queued work still reads its inputs
        # All live graphs share one memory pool, because they are launched one after another.
        pool = next((other.pool() for other in _graphs), None)
        settings = {"auto_dispatch_capture": True, "capture_error_mode": "thread_local"}
        with _restored(graph), npu.graph(graph, pool=pool, stream=aside, **settings):
            work()
    _graphs.add(graph)
    return _Launch(graph, npu.Event(), work)


@dataclass(frozen=True, slots=True)
class _Launch:
    graph: Any
    launched: Any
    """Event behind the last launch."""
    work: Callable[[], object]
    """The captured work. It keeps its tensors alive, because torch_npu refers to them weakly."""

    def __call__(self, lengths: Sequence[int]) -> None:
        mode = self.graph.graph_dispatch_mode
        if mode.graph_dispatch_records:
            # The update must not reach a launch that still runs. It waits on its own stream, and the host continues.
            mode.update_stream.wait_event(self.launched)
            self.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [*lengths]}])
        self.graph.replay()
        self.launched.record()


@contextmanager
def _restored(graph: Any) -> Iterator[None]:
    """Undo what torch.npu.graph leaves behind if a capture fails: its dispatch mode, and its use of the memory pool."""
    try:
        yield
    except BaseException:
        if _get_current_dispatch_mode() is graph.graph_dispatch_mode:
            _pop_mode()
        _graphs.clear()  # the allocator refuses the pool in later captures, so the next graph begins a new pool
        raise


_graphs: WeakSet[Any] = WeakSet()
"""The captured graphs that are still referenced and share the memory pool of later graphs."""


@cache
def _aside(_: int) -> Any:
    """Return the stream on which all graphs of a device are captured. Memory of the pool belongs to this stream."""
    return torch.npu.Stream()  # type: ignore[attr-defined]
