"""Numbers of operators that the device runs, by name. A view is no operator. A copy within the device is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tests.ascend.operators import order
from tests.ascend.operators.aicpu import runs_on_aicpu
from tests.ascend.operators.costs import cost
from tests.ascend.operators.strides import hidden_copies

names: dict[str, Counter[str]] = {kind: Counter() for kind in ("launches", "hidden copies", "aicpu")}
"""For each of the simulator's counters of operators, the operators that it has counted."""


def launched(
    stream: int,
    operator: str,
    named: Mapping[str, Any],
    tensors: Sequence[Tensor],
    written: Sequence[Tensor],
    result: Any,
    captured: bool = False,
) -> None:
    """Count a launch of `operator`, its hidden copies, and whether it runs on the AI CPU. Advance the virtual clocks.

    Args:
        stream: The stream.
        operator: Name of the operator.
        named: Arguments by name.
        tensors: All device tensors of the call in the order of the schema.
        written: The tensors that the operator changes.
        result: Result.
        captured: Whether a graph captures the operator. It is not counted then, but takes time when the graph runs.

    """
    on_aicpu = runs_on_aicpu(operator, tensors)
    copied = hidden_copies(operator, tensors, written)
    for kind, count in (("launches", 1), ("hidden copies", len(copied)), ("aicpu", int(on_aicpu))):
        if count and not captured:
            names[kind][operator] += count
            order.count(kind, count)
    if order.clock_is_on():
        moved, operations = cost(operator, named, result)
        moved += 2 * sum(tensor.numel() * tensor.element_size() for tensor in copied)
        order.launch(stream, moved, operations, on_aicpu)
