"""Checks of the Ascend NPUs of a machine, with advice on problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor import cann, driver, ports, runtime, smi, versions, visible
from mindie_mm.device.npu.doctor.machine import Machine, Software


def free_bytes() -> list[int]:
    """Return the free memory of each visible NPU in bytes. Return an empty list if npu-smi does not report it."""
    machine = Machine.here(Path("/"))
    return smi.free_bytes(machine, visible.places(machine))


def findings(root: Path) -> Iterator[Finding]:
    """Yield the results of all checks. Yield nothing on a machine without an NPU, CANN or torch_npu.

    System files are read below `root`, which is / except in tests. Programs are always run from this machine.
    """
    machine, software = Machine.here(root), Software.installed()
    installed, ids = cann.find(machine), machine.device_ids()
    if not (installed or ids or software.torch_npu or machine.num_boards()):
        return
    left = visible.places(machine)
    num_visible = len(ids) if left is None else len(left)
    # Run npu-smi before the trial, because otherwise npu-smi would list the process of the trial.
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
    for one in looked_at:  # if an NPU starts, none of these problems prevents the service from starting
        yield replace(one, status="warning") if starts and one.status == "error" else one
    yield tried
