"""What is wrong with the Ascend NPUs of a machine, in words, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor import cann, driver, ports, runtime, smi, versions, visible
from mindie_mm.device.npu.doctor.machine import Machine, Software


def findings(root: Path) -> Iterator[Finding]:
    """All that is looked at, or nothing on a machine without a sign of Ascend: no NPU, no CANN, no torch_npu.

    `root` is the folder of the files that are looked at, / but for tests. Programs and libraries are this machine's.
    """
    machine, software = Machine.here(root), Software.installed()
    installed, ids = cann.find(machine), machine.device_ids()
    if not (installed or ids or software.torch_npu or machine.num_boards()):
        return
    left = visible.places(machine)
    num_visible = len(ids) if left is None else len(left)
    # npu-smi comes before the trial, which would be one of the processes that it shows.
    used = list(smi.findings(machine, left)) if ids else []
    tried = runtime.finding(software)
    looked_at = (
        *driver.findings(machine),
        *cann.findings(machine, installed),
        *versions.findings(machine, software, installed),
        *used,
        *visible.findings(machine),
        *ports.findings(machine, num_visible),
    )
    starts = tried.status != "error"
    for one in looked_at:  # where an NPU starts, nothing of this keeps the service from starting
        yield replace(one, status="warning") if starts and one.status == "error" else one
    yield tried
