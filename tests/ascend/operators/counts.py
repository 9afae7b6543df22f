"""Numbers of operators that the device runs, by name. A view is no operator. A copy within the device is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from tests.ascend.operators import order
from tests.ascend.operators.aicpu import runs_on_aicpu
from tests.ascend.operators.strides import hidden_copies

names: dict[str, Counter[str]] = {kind: Counter() for kind in ("launches", "hidden copies", "aicpu")}
"""For each of the simulator's counters of operators, the operators that it has counted."""


def launched(operator: str, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Count a launch of `operator`, its hidden copies, and whether it runs on the AI CPU.

    `tensors` are all tensors of the call in the order of the schema, and `written` those that the operator changes.
    """
    found = {
        "launches": 1,
        "hidden copies": hidden_copies(operator, tensors, written),
        "aicpu": int(runs_on_aicpu(operator, tensors)),
    }
    for kind, count in found.items():
        if count:
            names[kind][operator] += count
            order.count(kind, count)
