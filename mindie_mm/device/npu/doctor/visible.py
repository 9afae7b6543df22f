"""The check of ASCEND_RT_VISIBLE_DEVICES, which selects the NPUs that this process may use."""

from __future__ import annotations

from collections.abc import Iterator

from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor.machine import Machine

_NAME = "ASCEND_RT_VISIBLE_DEVICES"


def places(machine: Machine) -> list[int] | None:
    """Return the indices of the visible NPUs, counted from 0, or None if the variable is not set.

    As in CANN, the value is a list of numbers separated by commas. Reading stops at the first part that is not the
    number of an NPU. Source: hiascend.com, environment variables of CANN 9.1.0.
    """
    value = machine.variables.get(_NAME)
    if value is None:
        return None
    left = []
    for part in value.split(","):
        if not part.isdecimal() or int(part) >= len(machine.device_ids()):
            break
        left.append(int(part))
    return left


def findings(machine: Machine) -> Iterator[Finding]:
    """Report the value of the variable. Yield nothing if it is not set."""
    left, value, num = places(machine), machine.variables.get(_NAME, ""), len(machine.device_ids())
    if left is None or not num:  # without NPUs, every number would be wrong; another check reports missing NPUs
        return
    advice = (
        f"set it to numbers from 0 to {num - 1} in ascending order, separated by commas without spaces; in a "
        "container, numbering starts at 0"
    )
    if not left:
        yield Finding("visible NPUs", "error", f"{_NAME} is {value!r}, which selects none of the {num} NPUs", advice)
    elif len(left) < len(value.split(",")):
        counted = ", ".join(map(str, left))
        yield Finding("visible NPUs", "warning", f"{_NAME} is {value!r}, but CANN reads only {counted}", advice)
    elif left != sorted(set(left)):
        yield Finding("visible NPUs", "warning", f"{_NAME} is {value!r}, which is not in ascending order", advice)
    else:
        yield Finding("visible NPUs", "ok", f"{', '.join(map(str, left))} of {num}")
