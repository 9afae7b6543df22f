"""The check of the health, memory and processes of each NPU, from the output of `npu-smi info`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mindie_mm.device import programs
from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor.machine import Machine
from mindie_mm.device.npu.doctor.symptoms import explain
from mindie_mm.settings.config import MiB

_TIMEOUT_S = 30.0  # npu-smi waits for the driver, which may have hung
_BUSY_SHARE = 0.25
"""Share of used memory above which an NPU counts as busy. On an idle 910B, 5% of 64 GiB are used."""

# Excerpt of the table of `npu-smi info`:
# | 0     910B3               | OK            | 91.0        36                0    / 0             |
# | 0                         | 0000:41:00.0  | 0           0    / 0          3401 / 65536         |
# A line about a process, between horizontal lines:
# | 2       0                 | 1333928       |                          | 37709                   |
_NPU = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|")
_CHIP = re.compile(r"^\|\s*(\d+)(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:\S+\s*\|(.*)\|")
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(.*?)\s*\|\s*(\d+)\s*\|")
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses an NPU."""

    pid: int
    name: str
    mib: int


@dataclass(frozen=True, slots=True)
class NPU:
    """A chip in the output of npu-smi."""

    npu: int
    chip: int
    name: str
    health: str
    """OK, Warning, Alarm, Critical or UNKNOWN."""
    used_mib: int
    total_mib: int
    """Total memory in MiB. 0 if unknown."""
    processes: tuple[Process, ...] = ()


def parse(text: str) -> list[NPU]:
    """Parse the table of `npu-smi info`. Return the chips in the order in which CANN numbers them."""
    npus: dict[tuple[int, int], NPU] = {}
    above: tuple[int, str, str] | None = None
    for line in text.splitlines():
        if found := _PROCESS.match(line):
            key, process = (int(found[1]), int(found[2])), Process(int(found[3]), found[4], int(found[5]))
            if key in npus:
                npus[key] = replace(npus[key], processes=(*npus[key].processes, process))
        elif found := _NPU.match(line):
            above = (int(found[1]), found[2], found[3])
        elif (found := _CHIP.match(line)) and above:
            usages = [(int(u), int(t)) for u, t in _USAGE.findall(found[2])]
            used, total = max(usages, key=lambda one: one[1], default=(0, 0))  # "NA / NA" if the chip does not answer
            npus[above[0], int(found[1])] = NPU(above[0], int(found[1]), above[1], above[2], used, total)
            above = None
    return [npus[key] for key in sorted(npus)]


def free_bytes(machine: Machine, visible: list[int] | None) -> list[int]:
    """Return the free memory of each visible NPU in bytes. Return an empty list if npu-smi does not report it."""
    npus = _selected(programs.output_of("npu-smi", "info", path=_folders(machine)), visible).values()
    return [(one.total_mib - one.used_mib) * MiB for one in npus if one.total_mib]


def _folders(machine: Machine) -> str:
    """Return the folders in which npu-smi may be, as in the variable PATH."""
    return os.pathsep.join((machine.variables.get("PATH", ""), "/usr/local/bin", "/usr/local/sbin"))


def _selected(output: str, visible: list[int] | None) -> dict[int, NPU]:
    """Return the visible NPUs in the output of npu-smi, by their indices."""
    return {place: one for place, one in enumerate(parse(output)) if visible is None or place in visible}


def findings(machine: Machine, visible: list[int] | None, timeout_s: float = _TIMEOUT_S) -> Iterator[Finding]:
    """Report the health and use of NPUs.

    Args:
        machine: Machine whose PATH is searched for npu-smi.
        visible: Indices of the NPUs that are visible to this process. None means all.
        timeout_s: Time limit for npu-smi in seconds.

    """
    program = shutil.which("npu-smi", path=_folders(machine))
    if program is None:
        advice = "in a container, mount /usr/local/bin/npu-smi and /usr/local/dcmi"
        yield Finding(
            "npu health", "warning", "npu-smi is not installed: the health and use of the NPUs are unknown", advice
        )
        return
    try:
        ended = programs.run([program, "info"], timeout_s)
    except OSError as error:  # the program is for another architecture, or its loader is missing
        yield Finding("npu health", "warning", f"npu-smi cannot be run: {error}", "reinstall the driver")
        return
    if ended is None:
        found = f"npu-smi info did not respond within {timeout_s:.0f} s"
        yield Finding("npu health", "error", found, "the driver does not respond: see dmesg, then reboot")
        return
    output = f"{ended.stdout}\n{ended.stderr}"
    npus = _selected(output, visible)
    if not npus:
        symptom = explain(output)
        text = " ".join(output.split())[:200] or f"no output, and exit status {ended.status}"
        meaning, advice = (symptom.meaning, symptom.advice) if symptom else ("", "see dmesg; reinstall the driver")
        yield Finding("npu health", "error", f"npu-smi info reports: {text}{meaning and f' ({meaning})'}", advice)
        return
    yield _health([*npus.values()])
    yield _use(npus)


def _health(npus: list[NPU]) -> Finding:
    ill = [one for one in npus if one.health.upper() != "OK"]
    if not ill:
        return Finding("npu health", "ok", f"{len(npus)} x {npus[0].name}")
    found = ", ".join(f"NPU {one.npu} chip {one.chip} ({one.name}): {one.health}" for one in ill)
    first = ill[0]
    advice = (
        f"npu-smi info -t health -i {first.npu} -c {first.chip} shows the fault; leave the NPU out with "
        f"ASCEND_RT_VISIBLE_DEVICES, or, when no process uses it, run npu-smi set -t reset -i {first.npu} -c "
        f"{first.chip}"
    )
    # An NPU with the health Warning still works. With Alarm or Critical it does not, and with UNKNOWN it has not
    # started.
    grave = any(one.health.upper() != "WARNING" for one in ill)
    return Finding("npu health", "error" if grave else "warning", found, advice)


def _use(npus: Mapping[int, NPU]) -> Finding:
    """Report busy NPUs. The keys of `npus` are indices for ASCEND_RT_VISIBLE_DEVICES.

    A card with two chips has two indices. In a container, the indices begin at 0.
    """
    busy = [one for one in npus.values() if one.processes or one.used_mib > _BUSY_SHARE * one.total_mib]
    if not busy:
        free = [one.total_mib - one.used_mib for one in npus.values() if one.total_mib]
        free_memory = f"{min(free) / 1024:.1f} GiB free on each" if free else "npu-smi does not report free memory"
        return Finding("npu use", "ok", f"no other process, {free_memory}")
    found = "; ".join(_occupied(one) for one in busy)
    idle = [str(place) for place, one in npus.items() if one not in busy]
    advice = (
        "stop these processes"
        if any(one.processes for one in busy)
        else "a process in another container or a dead process uses the memory"
    )
    advice += f", or use other NPUs: {len(idle)} are idle, ASCEND_RT_VISIBLE_DEVICES={','.join(idle)}" if idle else ""
    return Finding("npu use", "warning", found, f"{advice}; otherwise the KV cache gets only the remaining memory")


def _occupied(one: NPU) -> str:
    who = ", ".join(f"process {each.pid} {each.name}".strip() + f" has {each.mib} MiB" for each in one.processes)
    free = (one.total_mib - one.used_mib) / 1024
    return f"NPU {one.npu} chip {one.chip}: {free:.1f} of {one.total_mib / 1024:.1f} GiB free{who and f', {who}'}"
